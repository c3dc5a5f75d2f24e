"""Networks that mix convolutions and attention."""
