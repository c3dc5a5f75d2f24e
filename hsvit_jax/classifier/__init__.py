"""A trained network that answers: predictions, views of an image, votes that are lost."""

from hsvit_jax.classifier.classifier import Classifier as Classifier
from hsvit_jax.classifier.classifier import build_model as build_model
from hsvit_jax.classifier.classifier import load as load
