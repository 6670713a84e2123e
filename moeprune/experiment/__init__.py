"""A run from config to report: stages, directories, resume, tracking, reports."""
