"""HSViT: its trunk of convolutions, attention groups and head, alone and on a CNN backbone."""
