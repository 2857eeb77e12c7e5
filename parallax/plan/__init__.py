"""Decides: profiles, clusters, schedules, costs, simulation, search. Knows no torch."""
