"""What a run tells: the console's progress line and the metrics file."""
