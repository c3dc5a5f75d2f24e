"""Commands that look for settings, or repeat a run: learning rates, folds."""
