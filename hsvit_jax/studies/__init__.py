"""Commands that train more than one run: folds, rates, the papers' tables and figures."""
