// The last state_len columns of each packed sequence, zeros before its start.
//
// Formula   states[b, d, j] = x[end_b - state_len + j, d] if that is >= start_b, else 0.
// Threads   One for each (sequence, column, channel), channels fastest: reads and writes are contiguous.
// Bytes     batch * dim * state_len elements read and written. X is any type of the element's size: nothing is computed.
#include "prelude.cuh"

typedef X Element;  // X may be two words

struct CausalConv1dVarlenStatesParameters {
    const Element* x;  // (total, dim)
    const INDEX* cu_seqlens;  // (batch + 1)
    Element* states;  // (batch, state_len, dim) in memory
    i64 x_stride[2], cu_stride;
    int batch, dim, state_len;
};

extern "C" __global__ void __launch_bounds__(256) causal_conv1d_varlen_states(const CausalConv1dVarlenStatesParameters p) {
    const int d = blockIdx.x * 256 + threadIdx.x;
    if (d >= p.dim) return;
    for (i64 i = blockIdx.y; i < (i64)p.batch * p.state_len; i += gridDim.y) {
        const int b = (int)(i / p.state_len), j = (int)(i % p.state_len);
        const i64 start = (i64)p.cu_seqlens[b * p.cu_stride], end = (i64)p.cu_seqlens[(b + 1) * p.cu_stride];
        const i64 row = end - p.state_len + j;
        p.states[i * p.dim + d] = row >= start ? p.x[row * p.x_stride[0] + d * p.x_stride[1]] : Element(0);
    }
}
