// The wheel of the CUDA runtime includes this header of nvcc and does not have it. It checks the
// version of the host compiler; there is nothing to check here.
#pragma once
