// Around the scan's backward: its sums over blocks start at zero, and those of dB and dC end in B's and C's dtype and layout.
// One launch each, since every launch costs the host more than these kernels take on the card.
//
//     selective_scan_clear     up to five arrays of floats become zero
//     selective_scan_finish    dB, dC (any strides) = rounded sums, (2, batch, groups, dstate, seqlen) fp32
//
// Bytes: what is written; and 6 or 8 for each of the 2 x batch x groups x dstate x seqlen sums.
// Macro: X, the dtype of B and C.
#include "prelude.cuh"

struct SelectiveScanClearParameters {
    float* first;
    float* second;
    float* third;
    float* fourth;
    float* fifth;
    long long first_size, second_size, third_size, fourth_size, fifth_size;
};

extern "C" __global__ void __launch_bounds__(256) selective_scan_clear(const SelectiveScanClearParameters p) {
    const i64 start = (i64)blockIdx.x * 256 + threadIdx.x, stride = (i64)gridDim.x * 256;
    for (i64 i = start; i < p.first_size; i += stride) p.first[i] = 0.0f;
    for (i64 i = start; i < p.second_size; i += stride) p.second[i] = 0.0f;
    for (i64 i = start; i < p.third_size; i += stride) p.third[i] = 0.0f;
    for (i64 i = start; i < p.fourth_size; i += stride) p.fourth[i] = 0.0f;
    for (i64 i = start; i < p.fifth_size; i += stride) p.fifth[i] = 0.0f;
}

struct SelectiveScanFinishParameters {
    const float* sums;
    void* dB;
    void* dC;
    long long dB_stride[4];  // batch, group, state, step
    long long dC_stride[4];
    long long size;          // of one of the two
    int groups, dstate, seqlen;
};

extern "C" __global__ void __launch_bounds__(256) selective_scan_finish(const SelectiveScanFinishParameters p) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= p.size) return;
    const i64 row = i / p.seqlen;
    const int t = (int)(i - row * p.seqlen), n = (int)(row % p.dstate);
    const i64 sequence = row / p.dstate, group = sequence % p.groups, batch = sequence / p.groups;
    static_cast<X*>(p.dB)[batch * p.dB_stride[0] + group * p.dB_stride[1] + n * p.dB_stride[2] + t * p.dB_stride[3]] =
        from_float<X>(p.sums[i]);
    static_cast<X*>(p.dC)[batch * p.dC_stride[0] + group * p.dC_stride[1] + n * p.dC_stride[2] + t * p.dC_stride[3]] =
        from_float<X>(p.sums[p.size + i]);
}
