"""The kernels in Triton's language, one idea a file; importing these modules imports Triton."""
