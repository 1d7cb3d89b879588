"""The paper's experiments. They import taut; taut never imports them."""
