"""Studies that train several runs: comparisons, folds, rates, the papers' tables and figures."""
