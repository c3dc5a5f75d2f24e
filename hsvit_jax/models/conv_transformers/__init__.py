"""Networks that mix convolutions and attention: CvT, MobileViT, SwiftFormer, EfficientFormer."""
