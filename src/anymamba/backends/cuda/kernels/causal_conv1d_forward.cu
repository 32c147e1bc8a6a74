// Causal depthwise convolution, forward, for rows that are contiguous in time (any strides are correct, these are fast).
//
// Formula   out[b, d, t] = act(bias[d] + sum_k weight[d, k] * x[b, d, t - (WIDTH - 1) + k]); causal_conv1d.cuh says what lies
//           outside a row and what packed sequences change. Sums in float, the bias first, taps in ascending order.
// Threads   A block has one channel: 256 threads as (rows of the batch) x (pieces of a row), split by `piece_bits` so that a
//           short row does not leave threads idle. A thread has pieces of 16 bytes: VEC columns, read by one access, and the
//           WIDTH - 1 columns before them by another that hits L1 (the neighbour lane's data). The grid's y splits the tiles
//           of a channel; a block walks its tiles with the next one's loads issued before this one's arithmetic.
// Bytes     x once, out once: 2 * B * D * L * sizeof(X). Floor = that / copy bandwidth (H200: 4.3 TB/s; B4 D2048 L8192 bf16
//           0.063 ms). Arithmetic per element: WIDTH FMA, 2 special-function operations with SiLU: hidden.
#include "causal_conv1d.cuh"

#define THREADS 256
#define VEC (16 / (int)sizeof(X))
#define HALO (WIDTH == 2 ? 2 : 4)

struct CausalConv1dForwardParameters {
    const X* x;
    const W* weight;
    const BIAS* bias;  // or 0
    const SEQ* seq_idx;
    const X* initial_states;  // or 0
    X* out;
    X* final_states;  // (batch, dim, WIDTH - 1) contiguous, or 0
    i64 x_stride[3], out_stride[3];
    i64 weight_stride[2], bias_stride, seq_stride[2], initial_stride[3];
    int batch, dim, seqlen;
    int piece_bits;  // log2 of the threads along time
    int tiles;  // per channel: row groups * tiles along time
    int tiles_along_time;
};

struct Piece {
    X own[VEC];
    X before[HALO];  // the last BEFORE of them are used
};

__device__ __forceinline__ void read_piece(
    Piece& piece, const CausalConv1dForwardParameters& p, const X* row, const X* initial, int t0
) {
    read_columns<X, VEC>(piece.own, row, p.x_stride[2], t0, p.seqlen, X{});
    if (t0 >= HALO || !initial) {
        read_columns<X, HALO>(piece.before, row, p.x_stride[2], t0 - HALO, p.seqlen, X{});
    } else {
#pragma unroll
        for (int j = 0; j < HALO; ++j) {
            const int t = t0 - HALO + j;
            piece.before[j] = t < -BEFORE || t >= p.seqlen ? X{}
                              : t < 0                      ? initial[(t + BEFORE) * p.initial_stride[2]]
                                                           : row[t * p.x_stride[2]];
        }
        // With a shifted first piece (t0 < 0), columns of `own` before 0 are initial states too.
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const int t = t0 + j;
            if (t < 0 && t >= -BEFORE) piece.own[j] = initial[(t + BEFORE) * p.initial_stride[2]];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) causal_conv1d_forward(const CausalConv1dForwardParameters p) {
    const int d = blockIdx.x;
    const int pieces = 1 << p.piece_bits;
    const int piece_index = threadIdx.x & (pieces - 1);
    const int row_in_group = threadIdx.x >> p.piece_bits;
    const int rows = THREADS >> p.piece_bits;

    float w[WIDTH];
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) w[k] = to_float(p.weight[d * p.weight_stride[0] + k * p.weight_stride[1]]);
    const float bias = p.bias ? to_float(p.bias[d * p.bias_stride]) : 0.0f;

    int tile = blockIdx.y;
    Piece next;
    int next_b, next_t0;
    const X* next_row;
    const X* next_initial;
#define LOCATE_AND_READ()                                                                                  \
    {                                                                                                      \
        next_b = tile / p.tiles_along_time * rows + row_in_group;                                          \
        next_row = p.x + next_b * p.x_stride[0] + d * p.x_stride[1];                                       \
        next_t0 = ((tile % p.tiles_along_time << p.piece_bits) + piece_index) * VEC -                      \
                  misalignment<VEC>(next_row, p.x_stride[2]);                                              \
        next_initial = p.initial_states                                                                    \
                           ? p.initial_states + next_b * p.initial_stride[0] + d * p.initial_stride[1]     \
                           : (const X*)0;                                                                  \
        if (next_b < p.batch && next_t0 < p.seqlen) read_piece(next, p, next_row, next_initial, next_t0);  \
    }
    LOCATE_AND_READ();
    for (;;) {
        const Piece piece = next;
        const int b = next_b, t0 = next_t0;
        const X* row = next_row;
        const X* initial = next_initial;
        tile += gridDim.y;
        const bool more = tile < p.tiles;
        if (more) LOCATE_AND_READ();

        if (b < p.batch && t0 < p.seqlen) {
            float column[BEFORE + VEC];
#pragma unroll
            for (int j = 0; j < BEFORE; ++j) column[j] = to_float(piece.before[HALO - BEFORE + j]);
#pragma unroll
            for (int j = 0; j < VEC; ++j) column[BEFORE + j] = to_float(piece.own[j]);
#if HAS_SEQ
            const SEQ* seq_row = p.seq_idx + b * p.seq_stride[0];
            SEQ owner[BEFORE + VEC];
            {
                const SEQ first = seq_row[0];
                SEQ own[VEC];
                read_columns<SEQ, VEC>(own, seq_row, p.seq_stride[1], t0, p.seqlen, SEQ(-1));
#pragma unroll
                for (int j = 0; j < BEFORE; ++j) {
                    const int t = t0 - BEFORE + j;
                    owner[j] = t < 0 ? first : t < p.seqlen ? seq_row[t * p.seq_stride[1]] : SEQ(-1);
                }
#pragma unroll
                for (int j = 0; j < VEC; ++j) owner[BEFORE + j] = t0 + j < 0 ? first : own[j];
            }
#endif
            X result[VEC];
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                float y = bias;
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) {
#if HAS_SEQ
                    y += owner[j + k] == owner[j + BEFORE] ? w[k] * column[j + k] : 0.0f;
#else
                    y = __fmaf_rn(w[k], column[j + k], y);
#endif
                }
#if SILU
                y = silu(y);
#endif
#if HAS_SEQ
                if (owner[j + BEFORE] < 0) y = 0.0f;
#endif
                result[j] = from_float<X>(y);
            }
            write_columns<X, VEC>(
                result, p.out + b * p.out_stride[0] + d * p.out_stride[1], p.out_stride[2], t0, p.seqlen
            );
            if (p.final_states && t0 + VEC >= p.seqlen) {  // the thread of the row's last piece
#pragma unroll
                for (int j = 0; j < BEFORE; ++j) {
                    const int t = p.seqlen - BEFORE + j;
                    X value = t >= 0    ? row[t * p.x_stride[2]]
                              : initial ? initial[(t + BEFORE) * p.initial_stride[2]]
                                        : X{};
#if HAS_SEQ
                    const SEQ last = seq_row[(p.seqlen - 1) * p.seq_stride[1]];
                    if (seq_row[(t < 0 ? 0 : t) * p.seq_stride[1]] != last) value = X{};
#endif
                    p.final_states[((i64)b * p.dim + d) * BEFORE + j] = value;
                }
            }
        }
        if (!more) break;
    }
}
