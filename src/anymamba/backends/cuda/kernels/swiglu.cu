// SwiGLU, forward and backward: out = silu(x) * y for the halves x, y of a row.
//
// Formula   dx = dout * y * silu'(x), dy = dout * silu(x).
// Threads   One for V neighbouring columns of a half: an access of 16 bytes each where aligned. INDEX is int up to 2^31
//           threads, so that the division by a row's threads is a 32-bit one.
// Bytes     Forward 3, backward 5 (6 with out) elements a column: the floor is a copy of as many bytes.
#define LANES 256
#define UNITS 1
#define PACKS 1
#include "norm.cuh"

struct SwigluParameters {
    const X* xy;
    const DOUT* dout;  // the backward's
    X* dxy;
    X* out;  // or 0 in the backward
    i64 xy_stride, dout_stride, dxy_stride, out_stride;
    i64 rows;
    int dim, across;  // across: threads of a row, dim / V
};

extern "C" __global__ void __launch_bounds__(256) swiglu(const SwigluParameters p) {
    const INDEX at = (INDEX)blockIdx.x * blockDim.x + threadIdx.x;
    const INDEX row = at / (INDEX)p.across;
    if (row >= p.rows) return;
    const int column = (int)(at - row * (INDEX)p.across) * V;
    float x[V], y[V], out[V];
    load_floats<X>(x, p.xy + row * p.xy_stride + column);
    load_floats<X>(y, p.xy + row * p.xy_stride + p.dim + column);
#if BACKWARD
    float dout[V], dx[V], dy[V];
    load_floats<DOUT>(dout, p.dout + row * p.dout_stride + column);
#pragma unroll
    for (int i = 0; i < V; ++i) {
        const float s = sigmoid(x[i]), open = x[i] * s;
        dx[i] = dout[i] * y[i] * (s + open * (1.0f - s));
        dy[i] = dout[i] * open;
        out[i] = open * y[i];
    }
    store_floats<X>(p.dxy + row * p.dxy_stride + column, dx);
    store_floats<X>(p.dxy + row * p.dxy_stride + p.dim + column, dy);
    if (p.out) store_floats<X>(p.out + row * p.out_stride + column, out);
#else
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = silu(x[i]) * y[i];
    store_floats<X>(p.out + row * p.out_stride + column, out);
#endif
}
