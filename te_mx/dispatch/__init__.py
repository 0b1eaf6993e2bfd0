"""Problems, kernels, and the only place that chooses among them."""
