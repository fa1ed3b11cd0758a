"""Writing a trained drafter in the formats that servers load, and reading those formats back."""
