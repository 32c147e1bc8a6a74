// Causal depthwise convolution, backward, for rows that are contiguous in time (any strides are correct, these are fast).
//
// Formula   With y the value before the activation, recomputed here, and dy = dout * act'(y) (0 in padding):
//             dx[t]        = sum_k weight[k] * dy[t + (WIDTH - 1) - k]      (only within one packed sequence)
//             dweight[k]   = sum_{b, t} dy[t] * x[t - (WIDTH - 1) + k]
//             dbias        = sum_{b, t} dy[t]
//           dfinal_states adds to dx of the last columns; dx of columns before the first is dinitial_states.
// Threads   A block has one channel: 256 threads as (sequences) x (pieces of a row), and walks its tiles. A piece is 32
//           bytes, COLUMNS columns in two accesses: the WIDTH - 1 columns read on both sides of x and after dout (L1
//           hits), and dy of the neighbour's WIDTH - 1 columns computed again (no exchange between threads), weigh half
//           as much as with 16. y is computed already scaled by -log2(e), as the exponential wants it. dweight and dbias
//           stay in registers until the block ends. ALIGNED and HAS_STATES as in the forward.
// Order     Sums are made in an order that depends on shapes and card only: lanes by shuffles, warps by index, blocks (gridDim.y
//           > 1) by `causal_conv1d_sum_parts`. So results are bit-equal in every run; there are no atomics.
// Bytes     x, dout, dx once: 3 * B * D * L * sizeof(X); floor = that / copy bandwidth (H200, B4 D2048 L8192 bf16: 0.094
//           ms). About 230 instructions for 8 bf16 columns of a thread: issue takes 0.06 ms there.
//           Measured (H200, bf16, share of the floor): 0.77 at B32 L256, 0.86 at B8 L2048, 0.92 at B4 L8192; fp32 0.84
//           to 0.90.
// Lost      Pieces of 16 bytes: 370 instructions for 8 columns, 0.117 ms. Explicit reading ahead of the next tile: ptxas
//           moves it back; other warps hide the latency. More and smaller blocks: the end of a block costs as much as
//           half a tile.
#include "causal_conv1d.cuh"

#define THREADS 256
#define VEC (16 / (int)sizeof(X))
#define COLUMNS (2 * VEC)
#define HALO (WIDTH == 2 ? 2 : 4)

struct CausalConv1dBackwardParameters {
    const X* x;
    const W* weight;
    const BIAS* bias;  // or 0
    const X* dout;
    const SEQ* seq_idx;
    const X* initial_states;  // or 0
    const X* dfinal_states;  // or 0
    X* dx;
    W* dweight;  // used if gridDim.y == 1
    BIAS* dbias;  // or 0; the same
    float* parts;  // (gridDim.y, dim, WIDTH + 1) else: the blocks' sums of dweight and dbias
    X* dinitial_states;  // or 0
    i64 x_stride[3], dout_stride[3], dx_stride[3];
    i64 weight_stride[2], bias_stride, seq_stride[2], initial_stride[3], dfinal_stride[3];
    i64 dweight_stride[2], dbias_stride, dinitial_stride[3];
    int batch, dim, seqlen;
    int piece_bits;  // log2 of the threads along time
    int tiles;  // per channel: row groups * tiles along time
    int tiles_along_time;
};

struct Piece {
    Pack<X, VEC> own[2], dout[2];
    Pack<X, HALO> before, after, dout_after;
};

struct Row {
    const X* x;
    const X* initial;  // or 0
    const X* dout;
    const SEQ* seq;
};

__device__ __forceinline__ Row locate(const CausalConv1dBackwardParameters& p, int b, int d) {
    Row row;
    row.x = p.x + b * p.x_stride[0] + d * p.x_stride[1];
    row.initial = p.initial_states ? p.initial_states + b * p.initial_stride[0] + d * p.initial_stride[1] : (const X*)0;
    row.dout = p.dout + b * p.dout_stride[0] + d * p.dout_stride[1];
    row.seq = p.seq_idx + b * p.seq_stride[0];
    return row;
}

__device__ __forceinline__ X column_at(const CausalConv1dBackwardParameters& p, const Row& row, int t) {
    if (t >= 0) return t < p.seqlen ? row.x[t * p.x_stride[2]] : X{};
    return row.initial && t >= -BEFORE ? row.initial[(t + BEFORE) * p.initial_stride[2]] : X{};
}

#if HAS_SEQ
__device__ __forceinline__ SEQ owner_at(const CausalConv1dBackwardParameters& p, const Row& row, int t) {
    return t < p.seqlen ? row.seq[(t < 0 ? 0 : t) * p.seq_stride[1]] : SEQ(-1);
}
#endif

// ALIGNED: without a branch; what is not there is read from where something is, and made 0 when used.
__device__ __forceinline__ Piece read_piece(const CausalConv1dBackwardParameters& p, const Row& row, int t0) {
    Piece piece;
#if ALIGNED
    const X* x = row.x + t0;
    const X* dout = row.dout + t0;
    const bool last = t0 + COLUMNS >= p.seqlen;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        piece.own[i] = load_pack<X, VEC>(x + i * VEC);
        piece.dout[i] = load_pack<X, VEC>(dout + i * VEC);
    }
    piece.before = load_pack<X, HALO>(t0 > 0 ? x - HALO : x);
    piece.after = load_pack<X, HALO>(last ? x : x + COLUMNS);
    piece.dout_after = load_pack<X, HALO>(last ? dout : dout + COLUMNS);
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        piece.own[i] = read_columns<X, VEC>(row.x, p.x_stride[2], t0 + i * VEC, p.seqlen, X{});
        piece.dout[i] = read_columns<X, VEC>(row.dout, p.dout_stride[2], t0 + i * VEC, p.seqlen, X{});
    }
    piece.before = read_columns<X, HALO>(row.x, p.x_stride[2], t0 - HALO, p.seqlen, X{});
    piece.after = read_columns<X, HALO>(row.x, p.x_stride[2], t0 + COLUMNS, p.seqlen, X{});
    piece.dout_after = read_columns<X, HALO>(row.dout, p.dout_stride[2], t0 + COLUMNS, p.seqlen, X{});
#endif
#if HAS_STATES
    if (row.initial && t0 < BEFORE) {
#pragma unroll
        for (int j = 0; j < HALO; ++j)
            if (t0 - HALO + j < 0) piece.before.at[j] = column_at(p, row, t0 - HALO + j);
#pragma unroll
        for (int j = 0; j < VEC; ++j)  // a shifted first piece begins before column 0
            if (t0 + j < 0) piece.own[0].at[j] = column_at(p, row, t0 + j);
    }
#endif
    return piece;
}

#if HAS_STATES
// dy of one column, from memory: for the few columns of dinitial_states.
__device__ __forceinline__ float dy_at(
    const CausalConv1dBackwardParameters& p, const Row& row, const float* w, float bias, int t
) {
    float y = bias;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        float column = to_float(column_at(p, row, t - BEFORE + k));
#if HAS_SEQ
        if (owner_at(p, row, t - BEFORE + k) != owner_at(p, row, t)) column = 0.0f;
#endif
        y = __fmaf_rn(w[k], column, y);
    }
    float dy = to_float(row.dout[t * p.dout_stride[2]]);
#if SILU
    dy *= silu_derivative(y);
#endif
#if HAS_SEQ
    if (owner_at(p, row, t) < 0) dy = 0.0f;
#endif
    return dy;
}

__device__ __forceinline__ void write_dinitial(const CausalConv1dBackwardParameters& p, const Row& row, int b, int d) {
    float w[WIDTH], bias = p.bias ? to_float(p.bias[d * p.bias_stride]) : 0.0f;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) w[k] = to_float(p.weight[d * p.weight_stride[0] + k * p.weight_stride[1]]);
    float sums[BEFORE];
#pragma unroll
    for (int j = 0; j < BEFORE; ++j) {
        sums[j] = 0.0f;
        // If the row is that short, column -BEFORE + j is number j - seqlen of the final states.
        if (p.dfinal_states && j - p.seqlen >= 0) {
            float add = to_float(
                p.dfinal_states[b * p.dfinal_stride[0] + d * p.dfinal_stride[1] + (j - p.seqlen) * p.dfinal_stride[2]]
            );
#if HAS_SEQ
            if (owner_at(p, row, -1) != owner_at(p, row, p.seqlen - 1)) add = 0.0f;
#endif
            sums[j] += add;
        }
    }
#pragma unroll
    for (int t = 0; t < BEFORE; ++t) {
        if (t < p.seqlen) {
            float dy = dy_at(p, row, w, bias, t);
#if HAS_SEQ
            if (owner_at(p, row, t) != owner_at(p, row, -1)) dy = 0.0f;
#endif
#pragma unroll
            for (int j = 0; j < BEFORE; ++j)  // tap k of output t is column t - BEFORE + k: j = t + k
                if (j - t >= 0) sums[j] = __fmaf_rn(w[j - t], dy, sums[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < BEFORE; ++j)
        p.dinitial_states[b * p.dinitial_stride[0] + d * p.dinitial_stride[1] + j * p.dinitial_stride[2]] =
            from_float<X>(sums[j]);
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS) causal_conv1d_backward(const CausalConv1dBackwardParameters p) {
    const int d = blockIdx.x;
    const int piece_index = threadIdx.x & ((1 << p.piece_bits) - 1);
    const int row_in_group = threadIdx.x >> p.piece_bits;
    const int rows = THREADS >> p.piece_bits;

    float w[WIDTH], scaled[WIDTH], sums[WIDTH + 1];  // of dweight, and dbias
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        w[k] = to_float(p.weight[d * p.weight_stride[0] + k * p.weight_stride[1]]);
        scaled[k] = -LOG2E * w[k];
        sums[k] = 0.0f;
    }
    sums[WIDTH] = 0.0f;
    const float scaled_bias = p.bias ? -LOG2E * to_float(p.bias[d * p.bias_stride]) : 0.0f;

    // Tiles along time first, then groups of rows.
    int along = blockIdx.y % p.tiles_along_time, group = blockIdx.y / p.tiles_along_time;
    const int step_along = gridDim.y % p.tiles_along_time, step_group = gridDim.y / p.tiles_along_time;
    for (int tile = blockIdx.y; tile < p.tiles; tile += gridDim.y) {
        const int b = group * rows + row_in_group;
        const Row row = locate(p, b, d);
        int t0 = ((along << p.piece_bits) + piece_index) * COLUMNS;
        along += step_along;
        group += step_group;
        if (along >= p.tiles_along_time) {
            along -= p.tiles_along_time;
            ++group;
        }
        if (b >= p.batch) continue;
#if !ALIGNED
        t0 -= misalignment<VEC>(row.x, p.x_stride[2]);
#endif
        if (t0 >= p.seqlen) continue;
        const Piece piece = read_piece(p, row, t0);

        float column[BEFORE + COLUMNS + BEFORE];  // from t0 - BEFORE on
        float dy[COLUMNS + BEFORE];  // from t0 on
        {
            float before[HALO], after[HALO], dout_after[HALO], own[2][VEC], dout[2][VEC];
            to_floats(before, piece.before);
            to_floats(after, piece.after);
            to_floats(dout_after, piece.dout_after);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                to_floats(own[i], piece.own[i]);
                to_floats(dout[i], piece.dout[i]);
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    column[BEFORE + i * VEC + j] = own[i][j];
                    dy[i * VEC + j] = dout[i][j];
                }
            }
#pragma unroll
            for (int j = 0; j < BEFORE; ++j) {
                column[j] = ALIGNED && t0 == 0 && !(HAS_STATES && row.initial) ? 0.0f : before[HALO - BEFORE + j];
                column[BEFORE + COLUMNS + j] = after[j];
                dy[COLUMNS + j] = dout_after[j];
            }
        }
#if HAS_SEQ
        SEQ owner[BEFORE + COLUMNS + BEFORE];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Pack<SEQ, VEC> own = read_columns<SEQ, VEC>(row.seq, p.seq_stride[1], t0 + i * VEC, p.seqlen, SEQ(-1));
#pragma unroll
            for (int j = 0; j < VEC; ++j)
                owner[BEFORE + i * VEC + j] = t0 + i * VEC + j < 0 ? owner_at(p, row, 0) : own.at[j];
        }
#pragma unroll
        for (int j = 0; j < BEFORE; ++j) {
            owner[j] = owner_at(p, row, t0 - BEFORE + j);
            owner[BEFORE + COLUMNS + j] = owner_at(p, row, t0 + COLUMNS + j);
        }
#endif
#pragma unroll
        for (int j = 0; j < COLUMNS + BEFORE; ++j) {
#if SILU
            float y = scaled_bias;  // times -log2(e)
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
#if HAS_SEQ
                y += owner[j + k] == owner[j + BEFORE] ? scaled[k] * column[j + k] : 0.0f;
#else
                y = __fmaf_rn(scaled[k], column[j + k], y);
#endif
            }
            // silu'(y) = gate * (1 + y * (1 - gate))
            const float gate = fast_reciprocal(1.0f + fast_exp2(y));
            dy[j] *= gate * __fmaf_rn(y, __fmaf_rn(gate, LN2, -LN2), 1.0f);
#endif
#if HAS_SEQ
            if (owner[j + BEFORE] < 0) dy[j] = 0.0f;
#endif
            // Columns past the end, and what ALIGNED read in their place.
            if (ALIGNED ? j >= COLUMNS && t0 + COLUMNS >= p.seqlen : t0 + j >= p.seqlen) dy[j] = 0.0f;
        }
        float dx[COLUMNS];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            sums[WIDTH] += dy[j];
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
#if HAS_SEQ
                if (owner[j + k] == owner[j + BEFORE]) sums[k] = __fmaf_rn(dy[j], column[j + k], sums[k]);
                if (owner[j + BEFORE] == owner[j + BEFORE + BEFORE - k]) sum = __fmaf_rn(w[k], dy[j + BEFORE - k], sum);
#else
                sums[k] = __fmaf_rn(dy[j], column[j + k], sums[k]);
                sum = __fmaf_rn(w[k], dy[j + BEFORE - k], sum);
#endif
            }
#if HAS_STATES
            if (p.dfinal_states && t0 + COLUMNS > p.seqlen - BEFORE) {
                const int from_end = t0 + j - (p.seqlen - BEFORE);
                if (from_end >= 0 && from_end < BEFORE && t0 + j >= 0) {
                    float add = to_float(
                        p.dfinal_states[b * p.dfinal_stride[0] + d * p.dfinal_stride[1] + from_end * p.dfinal_stride[2]]
                    );
#if HAS_SEQ
                    if (owner[j + BEFORE] != owner_at(p, row, p.seqlen - 1)) add = 0.0f;
#endif
                    sum += add;
                }
            }
#endif
            dx[j] = sum;
        }
        X* dx_row = p.dx + b * p.dx_stride[0] + d * p.dx_stride[1];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float part[VEC];
#pragma unroll
            for (int j = 0; j < VEC; ++j) part[j] = dx[i * VEC + j];
            Pack<X, VEC> result;
            from_floats(result, part);
#if ALIGNED
            store_pack<X, VEC>(dx_row + t0 + i * VEC, result);
#else
            write_columns<X, VEC>(result, dx_row, p.dx_stride[2], t0 + i * VEC, p.seqlen);
#endif
        }
#if HAS_STATES
        if (p.dinitial_states && t0 <= 0 && t0 + COLUMNS > 0) write_dinitial(p, row, b, d);
#endif
    }

    __shared__ float of_warp[THREADS / 32][WIDTH + 1];
#pragma unroll
    for (int k = 0; k <= WIDTH; ++k) {
        sums[k] = sum_over_lanes<32>(sums[k]);
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32][k] = sums[k];
    }
    __syncthreads();
    const int k = threadIdx.x;
    if (k > WIDTH) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) sum += of_warp[warp][k];
    if (gridDim.y > 1)
        p.parts[((i64)blockIdx.y * p.dim + d) * (WIDTH + 1) + k] = sum;
    else if (k < WIDTH)
        p.dweight[d * p.dweight_stride[0] + k * p.dweight_stride[1]] = from_float<W>(sum);
    else if (p.dbias)
        p.dbias[d * p.dbias_stride] = from_float<BIAS>(sum);
}
