"""Models whose weights come from disk layer by layer, for models larger than memory."""
