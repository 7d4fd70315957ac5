"""Writes images.npz: scikit-learn's digits in the layout that `data: {name: npz}` reads."""

import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
images, labels = (digits.images * 15).astype(np.uint8), digits.target
test = np.arange(len(labels)) % 5 == 0
np.savez(
    "images.npz",
    x_train=images[~test],
    y_train=labels[~test],
    x_test=images[test],
    y_test=labels[test],
)
