"""How a run is observed: announcements and progress merged, metrics, and loggers."""
