// In place of CUDA's: simt/cuda.hpp has the functions.
#pragma once
