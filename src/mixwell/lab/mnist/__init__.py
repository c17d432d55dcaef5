"""The paper's experiment on images."""
