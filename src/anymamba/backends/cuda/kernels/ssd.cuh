// What the kernels of the state-space dual scan share: scalars of any type, step sizes and their sums in a chunk, tiles.
#pragma once
#include "mma.cuh"

template <bool first, class A, class B>
struct Choose {
    typedef A type;
};
template <class A, class B>
struct Choose<false, A, B> {
    typedef B type;
};

template <int n>
struct Constant {
    static constexpr int value = n;
};

__device__ __forceinline__ void clear(float (&sums)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = 0.0f;
}

// Waits for those warps, `threads` together, that name the same barrier (1 to 15), not for the whole block.
template <int threads>
__device__ __forceinline__ void barrier_of(int which) {
#ifdef ANYMAMBA_EMULATED
    __syncthreads();
#else
    asm volatile("bar.sync %0, %1;" ::"r"(which), "n"(threads) : "memory");
#endif
}

// Element number `at` of a small tensor whose type is only known at run time: 0 f32, 1 f16, 2 bf16.
__device__ __forceinline__ float load_any(const void* address, int type, i64 at) {
    if (type == 0) return static_cast<const float*>(address)[at];
    if (type == 1) return to_float(static_cast<const f16*>(address)[at]);
    return to_float(static_cast<const bf16*>(address)[at]);
}
__device__ __forceinline__ i64 load_integer(const void* address, int wide, i64 at) {
    return wide ? static_cast<const i64*>(address)[at] : (i64)static_cast<const int*>(address)[at];
}

// Step sizes of one head: d = clamp(softplus(dt + bias)).
struct Steps {
    const void* dt;
    i64 at, stride;
    int type, softplus;
    float bias, A, low, high;

    // Steps from .. from + length - 1 as they are stored; lane i has length / 32 neighbours. Steps from `to` on do not exist.
    template <int length>
    __device__ __forceinline__ void load(int from, int to, float (&raw)[(length + 31) / 32]) const {
        constexpr int each = (length + 31) / 32;
        const int first = from + threadIdx.x % 32 * each;
#pragma unroll
        for (int e = 0; e < each; ++e) raw[e] = first + e < to ? load_any(dt, type, at + (first + e) * stride) : 0.0f;
    }
    // Not fminf, fmaxf: a NaN stays one, as with torch.clamp.
    __device__ __forceinline__ float size(float raw) const {
        float d = raw + bias;
        if (softplus) d = ::softplus(d);
        return d < low ? low : d > high ? high : d;
    }
};

// Which of the steps from .. from + length - 1 begin a new sequence; lane i has length / 32 neighbours.
template <int length, bool sequences>
__device__ __forceinline__ void load_changes(
    const void* seq_idx, int wide, i64 at, i64 stride, int from, int to, int (&changes)[(length + 31) / 32]) {
    constexpr int each = (length + 31) / 32;
#pragma unroll
    for (int e = 0; e < each; ++e) {
        const int number = threadIdx.x % 32 * each + e, step = from + number;
        changes[e] = 0;
        if (sequences && step > 0 && step < to && number < length)
            changes[e] = load_integer(seq_idx, wide, at + step * stride) != load_integer(seq_idx, wide, at + (step - 1) * stride);
    }
}

// One warp works out the scalars of a chunk of `count` steps and writes them to shared memory: `sizes`, cs = cumsum(d * A * log2 e) and d
// of each; `leaving`, exp2(cs[last] - cs) * d, and behind it exp2(cs[last]) and cs[last]. `precise`: cs is summed in double and kept as two
// floats (`rest` has the second), so that the difference of two large sums keeps its last digits. Sequences: `changes` says
// which steps begin a new one; `runs` counts them; what would cross a change is 0.
template <int length, bool precise, bool sequences>
__device__ __forceinline__ void place_scalars(
    const Steps& steps, const float (&raw)[(length + 31) / 32], const int (&changes)[(length + 31) / 32], int count, float* sizes, float* rest,
    float* leaving, int* runs) {
    constexpr int each = (length + 31) / 32;
    const int lane = threadIdx.x % 32;
    typedef typename Choose<precise, double, float>::type Sum;
    Sum sums[each], before;
    float d[each];
    int begun[each];
#pragma unroll
    for (int e = 0; e < each; ++e) {
        d[e] = lane * each + e < count ? steps.size(raw[e]) : 0.0f;
        sums[e] = (Sum)d[e] * ((Sum)steps.A * (Sum)1.4426950408889634);
        begun[e] = sequences ? changes[e] : 0;
        if (e) {
            sums[e] += sums[e - 1];
            begun[e] += begun[e - 1];
        }
    }
    Sum scan = sums[each - 1];
    int counted = begun[each - 1];
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const Sum from = __shfl_up_sync(ALL_LANES, scan, by);
        const int counted_from = sequences ? __shfl_up_sync(ALL_LANES, counted, by) : 0;
        if (lane >= by) {
            scan += from;
            counted += counted_from;
        }
    }
    const Sum last = __shfl_sync(ALL_LANES, scan, 31);
    const int last_run = sequences ? __shfl_sync(ALL_LANES, counted, 31) : 0;
    before = __shfl_up_sync(ALL_LANES, scan, 1);
    int counted_before = sequences ? __shfl_up_sync(ALL_LANES, counted, 1) : 0;
    if (lane == 0) {
        before = 0;
        counted_before = 0;
    }
#pragma unroll
    for (int e = 0; e < each; ++e) {
        const int at = lane * each + e;
        if (at < length) {
            const Sum sum = before + sums[e];
            sizes[2 * at] = (float)sum;
            sizes[2 * at + 1] = d[e];
            if (precise) rest[at] = (float)(sum - (Sum)(float)sum);
            const bool stays = !sequences || counted_before + begun[e] == last_run;
            leaving[at] = stays ? fast_exp2((float)(last - sum)) * d[e] : 0.0f;
            if (sequences) runs[at] = counted_before + begun[e];
        }
    }
    if (lane == 0) {
        leaving[length] = last_run ? 0.0f : fast_exp2((float)last);
        leaving[length + 1] = last_run ? -__int_as_float(0x7f800000) : (float)last;
    }
}

// Rows from .. from + length - 1 of a matrix into a tile of `width` columns; rows from `to` on and columns from `columns` on are
// zeros. Done by `threads` threads, of which this is number `thread`.
template <int length, int width, int stride, int threads, bool packed>
__device__ __forceinline__ void fetch_tile(
    int thread, X* tile, const X* matrix, i64 row_stride, i64 column_stride, int from, int to, int columns) {
    if (packed) {
        constexpr int vector = 16 / sizeof(X), row_vectors = width / vector, rows_at_once = threads / row_vectors;
        static_assert(threads % row_vectors == 0, "whole rows at once");
        const int first = thread / row_vectors, column = thread % row_vectors * vector;
        const int rows = column < columns ? min(to - from, length) : 0;
        const unsigned address = shared_address(tile) + (first * stride + column) * sizeof(X);
        const X* source = matrix + (from + first) * row_stride + column;  // one address that moves on: many would fill registers
        const i64 on = rows_at_once * row_stride;
#pragma unroll
        for (int row = 0; row < length; row += rows_at_once) {
            if (rows_at_once > length && first >= length) break;
            const bool valid = row + first < rows;
            copy_async_16(address + row * stride * sizeof(X), source, valid);
            source += on;
        }
    } else {
        for (int number = thread; number < length * width; number += threads) {
            const int row = number / width, column = number % width;
            X value = from_float<X>(0.0f);
            if (from + row < to && column < columns) value = matrix[(from + row) * row_stride + column * column_stride];
            tile[row * stride + column] = value;
        }
    }
}

// Four neighbouring elements of a row, of which `exist` do (packed: all or none; the address must be aligned).
template <class Element, bool packed>
__device__ __forceinline__ Pack<Element, 4> load_four(const Element* from, i64 stride, int exist) {
    Pack<Element, 4> four;
#pragma unroll
    for (int i = 0; i < 4; ++i) four.at[i] = from_float<Element>(0.0f);
    if (packed) {
        if (exist > 0) four = load_pack<Element, 4>(from);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < exist) four.at[i] = from[i * stride];
    }
    return four;
}
template <class Element, bool packed>
__device__ __forceinline__ void store_four(Element* to, int exist, const float (&from)[4]) {
    Pack<Element, 4> four;
    from_floats(four, from);
    if (packed) {
        if (exist > 0) store_pack(to, four);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < exist) to[i] = four.at[i];
    }
}
