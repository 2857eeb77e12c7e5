"""The simulation of action lists: timeline and peaks, and the correction of profiles by a run."""
