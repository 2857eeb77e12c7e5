"""The planner: profiles, clusters, schedules, costs, simulation and search. It does not import torch."""
