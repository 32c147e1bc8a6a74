// What the selective scan's forward and backward share: moving steps of a channel, and sums over the lanes of a channel.
//
// Macro X is the element type of u, delta, z, B, C, out and their gradients.
#pragma once
#include "prelude.cuh"

// The forward keeps the states entering each piece of so many steps (anymamba.ops.selective_scan.CHECKPOINT_LENGTH).
#define PIECE 128

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), the last by a polynomial e P(e) on (0, 1], relative error 5e-9 before rounding:
// no branch, one special function, and right to the last bits for very negative x, where delta usually is.
__device__ __forceinline__ float branchless_softplus(float x) {
    const float e = fast_exp2(-LOG2E * fabsf(x));
    float sum = -0.00324402121f;
    sum = fmaf(sum, e, 0.0198514443f);
    sum = fmaf(sum, e, -0.0569594987f);
    sum = fmaf(sum, e, 0.106036514f);
    sum = fmaf(sum, e, -0.153055906f);
    sum = fmaf(sum, e, 0.196759388f);
    sum = fmaf(sum, e, -0.249541342f);
    sum = fmaf(sum, e, 0.333299637f);
    sum = fmaf(sum, e, -0.499999017f);
    sum = fmaf(sum, e, 1.0f);
    return fmaf(sum, e, fmaxf(x, 0.0f));
}

// N elements as they lie in memory, in 32-bit words (two 16-bit elements each, the first in the lower half).
template <int N>
struct alignas(N * sizeof(X) < 4 ? 4 : N * sizeof(X)) Raw {
    unsigned at[N * sizeof(X) < 4 ? 1 : N * sizeof(X) / 4];
};

__device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ unsigned bits_of(f16 x) { return x.bits; }
__device__ __forceinline__ unsigned bits_of(bf16 x) { return x.bits; }

// The first argument only says the type.
__device__ __forceinline__ float element_of(float, unsigned word, bool) { return __uint_as_float(word); }
__device__ __forceinline__ float element_of(f16, unsigned word, bool upper) {
    f16 element;
    element.bits = (unsigned short)(upper ? word >> 16 : word);
    return to_float(element);
}
__device__ __forceinline__ float element_of(bf16, unsigned word, bool upper) {  // bf16 is the upper half of a float
    return __uint_as_float(upper ? word & 0xffff0000u : word << 16);
}

template <int N>
__device__ __forceinline__ void unpack(const Raw<N>& raw, float (&value)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = element_of(X{}, raw.at[i * sizeof(X) / 4], i % 2);
}

__device__ __forceinline__ unsigned two_rounded(float, float, float) { return 0; }  // two floats are no word
#if !defined(ANYMAMBA_EMULATED) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ unsigned two_rounded(bf16, float lower, float upper) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
    return word;
}
__device__ __forceinline__ unsigned two_rounded(f16, float lower, float upper) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
    return word;
}
#else
template <class Element>
__device__ __forceinline__ unsigned two_rounded(Element, float lower, float upper) {
    return bits_of(from_float<Element>(lower)) | bits_of(from_float<Element>(upper)) << 16;
}
#endif

template <int N>
__device__ __forceinline__ Raw<N> pack(const float (&value)[N]) {
    Raw<N> raw;
    if constexpr (sizeof(X) == 4 || N == 1) {
#pragma unroll
        for (int i = 0; i < N; ++i) raw.at[i] = bits_of(from_float<X>(value[i]));
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 2) raw.at[i / 2] = two_rounded(X{}, value[i], value[i + 1]);
    }
    return raw;
}

// Elements t .. t + N - 1 of a row whose neighbours are `step` elements apart; zeros from `end` on. `packed`: step is 1 and
// every aligned group of N elements may be moved by one access. `always`: packed, known when compiling, and `end` is a
// multiple of N too: no other code is made.
template <int N, bool always>
__device__ __forceinline__ Raw<N> load_steps(const X* row, i64 step, bool packed, int t, int end) {
    Raw<N> raw;
#pragma unroll
    for (unsigned& word : raw.at) word = 0;
    if (always ? t < end : packed && t + N <= end) {
        if constexpr (N * sizeof(X) >= 4) {
            raw = *reinterpret_cast<const Raw<N>*>(row + t);
        } else {
            raw.at[0] = bits_of(row[t]);
        }
    } else if (!always) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (t + i < end) raw.at[i * sizeof(X) / 4] |= bits_of(row[(t + i) * step]) << (sizeof(X) == 2 && i % 2 ? 16 : 0);
    }
    return raw;
}

template <int N, bool always>
__device__ __forceinline__ void store_steps(X* row, i64 step, bool packed, int t, int end, const float (&value)[N]) {
    if (always ? t < end : packed && t + N <= end) {
        const Raw<N> raw = pack(value);
        if constexpr (N * sizeof(X) >= 4) {
            *reinterpret_cast<Raw<N>*>(row + t) = raw;
        } else {
            row[t] = from_float<X>(value[0]);
        }
    } else if (!always) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (t + i < end) row[(t + i) * step] = from_float<X>(value[i]);
    }
}

// N floats in shared memory, by the widest accesses that N allows. Addresses are multiples of min(N, 4) floats.
template <int N>
__device__ __forceinline__ void load_floats(const float* address, float (&value)[N]) {
    constexpr int width = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < N; i += width) {
        const Pack<float, width> pack = load_pack<float, width>(address + i);
#pragma unroll
        for (int k = 0; k < width; ++k) value[i + k] = pack.at[k];
    }
}

template <int N>
__device__ __forceinline__ void store_floats(float* address, const float (&value)[N]) {
    constexpr int width = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < N; i += width) {
        Pack<float, width> pack;
#pragma unroll
        for (int k = 0; k < width; ++k) pack.at[k] = value[i + k];
        store_pack<float, width>(address + i, pack);
    }
}

// Sums value[0 .. 3] over groups of `width` neighbouring lanes, `q` being the lane in its group, with 3 exchanges for the
// first 4 lanes instead of 8: every exchange halves the number of values a lane still cares for. Returns in lane q the sum
// of value[(q & 1) * 2 + (q >> 1 & 1)]. Needs width >= 4.
template <int width>
__device__ __forceinline__ float sum_four_over_lanes(const float (&value)[4], int q) {
    const bool odd = q & 1, upper = q & 2;
    const float low = (odd ? value[2] : value[0]) + __shfl_xor_sync(ALL_LANES, odd ? value[0] : value[2], 1);
    const float high = (odd ? value[3] : value[1]) + __shfl_xor_sync(ALL_LANES, odd ? value[1] : value[3], 1);
    float sum = (upper ? high : low) + __shfl_xor_sync(ALL_LANES, upper ? low : high, 2);
#pragma unroll
    for (int step = 4; step < width; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
}
