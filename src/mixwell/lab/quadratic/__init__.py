"""The paper's motivating example: two quadratics."""
