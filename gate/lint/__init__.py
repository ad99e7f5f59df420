"""Static checks of the model's source for export hazards."""
