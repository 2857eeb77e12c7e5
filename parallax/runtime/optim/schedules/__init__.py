"""The learning-rate schedules: one module for each family."""
