"""Pages, pictures and grids of plans, and the validation of the planner on published runs."""
