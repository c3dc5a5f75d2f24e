"""ViX and its relatives: linear and fixed token mixers in place of softmax attention."""
