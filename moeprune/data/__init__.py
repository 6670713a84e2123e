"""Calibration and evaluation texts: read, turned into chats, encoded, split and sampled."""
