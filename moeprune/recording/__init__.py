"""One pass over calibration tokens: what every expert put out, how strongly it was weighted, and with whom it fired."""
