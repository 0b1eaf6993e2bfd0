// In place of CUDA's: simt/cuda.hpp has the language.
#pragma once
#include <cuda_runtime_api.h>
