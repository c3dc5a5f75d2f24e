"""ViX and its relatives: linear and fixed token mixers instead of softmax attention."""
