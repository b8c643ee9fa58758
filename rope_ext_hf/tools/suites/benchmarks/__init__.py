"""The suites of tasks that this package has: RULER, BABILong, GraphWalks, JSON lookups and short inputs."""
