"""What happens when action lists run: a timeline, its peaks, and what a run corrects."""
