// What the norms share: a row (or a group of its columns) belongs to LANES threads, which keep it in registers.
//
// Macros    V elements are moved by one access where everything is aligned (16 bytes of x), else V = 1. A thread has PACKS
//           times V columns: those at (j * LANES + lane) * V. FULL: these are exactly the columns there are. A block has
//           UNITS rows of LANES threads each; UNITS > 1 only where LANES is a warp, so that no barrier is met by a part of a
//           block's rows. BLOCKS of a kernel shall fit on a multiprocessor.
// Cost      16-bit rows need few instructions an element, or they, not memory, are the limit (at 4.2 TB/s an H200 has time for
//           about 40 of a gated norm): no division, no root but the approximate one, no 64-bit products per row.
// AHEAD     (Backwards, which walk rows.) The next row is read, as it lies in memory (Raw: 4 registers for 8 elements of 16
//           bits), before the one at hand is worked on: memory is not idle while sums are made and barriers met.
#pragma once
#include "prelude.cuh"

#define THREADS (LANES * UNITS)
#define WARPS (LANES / 32)

// V elements as they lie in memory, in parts of 16 bytes at most.
template <class Element>
struct Raw {
    static constexpr int STEP = V * (int)sizeof(Element) <= 16 ? V : 16 / (int)sizeof(Element);
    Pack<Element, STEP> part[V / STEP];
};

template <class Element>
__device__ __forceinline__ void load_raw(Raw<Element>& to, const Element* from) {
#pragma unroll
    for (int i = 0; i < V / Raw<Element>::STEP; ++i) {
        to.part[i] = load_pack<Element, Raw<Element>::STEP>(from + i * Raw<Element>::STEP);
    }
}

template <class Element>
__device__ __forceinline__ void floats_of(float (&to)[V], const Raw<Element>& from) {
    constexpr int STEP = Raw<Element>::STEP;
#pragma unroll
    for (int i = 0; i < V / STEP; ++i) {
        float some[STEP];
        to_floats(some, from.part[i]);
#pragma unroll
        for (int k = 0; k < STEP; ++k) to[i * STEP + k] = some[k];
    }
}

// Whether this thread's columns of pack j exist.
__device__ __forceinline__ bool inside(int j, int lane, int size) {
#if FULL
    return true;
#else
    return (j * LANES + lane) * V < size;
#endif
}

// Where pack j begins, from the thread's own first column on; past the end of the row its first column, read and not used.
__device__ __forceinline__ int pack_at(int j, int lane, int size) {
    return inside(j, lane, size) ? j * LANES * V : -lane * V;
}

// A thread's part of a weight or a bias of `size` columns.
template <class Element>
__device__ __forceinline__ void read_vector(Raw<Element> (&to)[PACKS], const Element* from, int size, int lane) {
#pragma unroll
    for (int j = 0; j < PACKS; ++j) load_raw<Element>(to[j], from + lane * V + pack_at(j, lane, size));
}

// 1 / sqrt(x), to 2^-23.
__device__ __forceinline__ float inverse_root(float x) {
#ifdef ANYMAMBA_EMULATED
    return 1.0f / sqrtf(x);
#else
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// V elements as floats.
template <class Element>
__device__ __forceinline__ void load_floats(float (&to)[V], const Element* from) {
    Raw<Element> raw;
    load_raw<Element>(raw, from);
    floats_of<Element>(to, raw);
}

template <class Element>
__device__ __forceinline__ void store_floats(Element* to, const float (&from)[V]) {
    constexpr int STEP = V * (int)sizeof(Element) <= 16 ? V : 16 / (int)sizeof(Element);
#pragma unroll
    for (int i = 0; i < V; i += STEP) {
        float some[STEP];
#pragma unroll
        for (int k = 0; k < STEP; ++k) some[k] = from[i + k];
        Pack<Element, STEP> pack;
        from_floats(pack, some);
        store_pack<Element, STEP>(to + i, pack);
    }
}

// COUNT sums over the LANES threads of a row, in a fixed order; every thread gets them. `shared` is the block's, of
// 2 * WARPS * COUNT floats; `turn` alternates between its halves, so that one barrier a sum is enough.
template <int COUNT>
__device__ __forceinline__ void sum_over_row(float (&x)[COUNT], float* shared, int& turn) {
#pragma unroll
    for (int c = 0; c < COUNT; ++c) x[c] = sum_over_lanes<32>(x[c]);
#if WARPS > 1
    float* half = shared + turn * WARPS * COUNT;
    turn ^= 1;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int c = 0; c < COUNT; ++c) half[c * WARPS + threadIdx.x / 32] = x[c];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
        x[c] = half[c * WARPS];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) x[c] += half[c * WARPS + w];
    }
#endif
}

// Scales what dropout keeps and zeroes the rest, also what is infinite. `keep` holds V bytes of 0 or 1.
__device__ __forceinline__ void drop(float (&x)[V], const unsigned char* keep, float scale) {
    const Pack<unsigned char, V> kept = load_pack<unsigned char, V>(keep);
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] = kept.at[i] ? x[i] * scale : 0.0f;
}
