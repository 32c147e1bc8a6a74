// State-space dual scan forward: per head a state h (headdim x dstate), h = exp(d*A)*h + d*x*B^T, y = h*C + D*x, times silu(z).
//
// Algorithm: one block walks the chunks of one (batch, head, PT columns of headdim) in order with the state in registers, so no
// state of a chunk is ever written to memory and everything is one kernel. With cs = cumsum(d*A*log2 e) inside a chunk of Q
// steps, r the first row of a strip of 16 rows, and S the state that enters the chunk:
//
//     Y = exp2(cs[i]-cs[r]) * ( exp2(cs[r]) * C S^T + sum over tiles of j < r:  (C B^T * exp2(cs[r]-cs[j])*d[j]) X )
//         + the tile on the diagonal:  (C B^T * exp2(cs[i]-cs[j])*d[j], j <= i) X
//     S = exp2(cs[last]) * S + X^T (exp2(cs[last]-cs[j])*d[j] * B)
//
// Only the diagonal tile needs an exp2 an element; everything exponentiated is <= 0 for A <= 0. All four products run on the
// tensor cores (mma.cuh); C B^T stays in registers as the left operand of the product with X, X's fragments serve Y and S,
// C's fragments serve C B^T and C S^T. The state is kept in float and rounded to X for C S^T alone.
//
// Thread mapping: WARPS warps. For Y: Q/16 strips of rows x COLUMN_WARPS parts of the PT columns. For S: STATE_N_WARPS parts of
// the states x STATE_P_WARPS parts of the PT columns. Tiles of x (Q x PT), B and C (Q x NT) arrive by cp.async, a chunk ahead
// when STAGES is 2. The state is shown to the others in STATE_BUFFERS buffers; when both are 2, there is one barrier a chunk. One warp at a time works out d and cs of the next chunk.
//
// Sequences: where seq_idx changes, decays across the change are 0. Where cu_seqlens ends a sequence the chunk ends too, so the
// state after the chunk is the state to return. Few heads: time is cut into segments; STATE_ONLY first finds what each adds to
// the state, then every block folds the segments before its own into its initial state (STATE_ONLY's may be finer).
//
// Bytes: x, z, out once; B and C once a block (from L2: blocks of a group run side by side); dt once. Operations a step, head and
// state tile: 2*NT*PT (C S^T) + 2*NT*PT (S) + Q*NT (C B^T, half of it) + Q*PT. Floors on an H200, bf16, H32 P64 N128, batch 4,
// L 8192: 0.066 ms for the bytes, 0.06 for 47 GFLOP at 790 TFLOP/s (mma.sync reaches about 0.6 of that). Measured (ms): 0.42 there
// (3 segments), 0.165 (batch 8, L 2048), 0.083 (32, 256), 0.88 (1, 65536), 3.2 (1, 65536, H128: 2.0e7 tokens/s).
// What bounds it (ncu, before the last changes; batch 8): instructions are issued in 43 % of the cycles, shared memory is busy
// for 60 %, the tensor cores for 24 %; warps wait for barriers, for fragments (short scoreboard), and with two warps a scheduler
// there are too few others. So counted were: instructions around the products, and loads waited for one by one.
//
// What helped, in this order (batch 8: 0.249, 0.208, 0.191, 0.165): all fragments of a step loaded before its products, without
// branches in between; several warps of the same rows sharing their scores instead of each finding all; right operands loaded in
// the order that mma wants (two moves a product less), addresses that move on instead of being worked out, C renewed a strip at
// a time. Lost: 16 warps a block (shared memory: every fragment is loaded by more warps), 32 columns a block (C B^T twice).
// Next: wgmma on sm_90, whose operands come from shared memory by themselves (no fragments to load, half the instructions), and
// one C B^T for several heads of a group.
//
// Macros: X; Q, PT, NT (>= dstate, a power of two), WARPS, STAGES, STATE_BUFFERS, MIN_BLOCKS; TF32 (f32: one product instead of three); GATED,
// SEQUENCES, STATE_ONLY, PACKED (x, B, C, z: rows contiguous and aligned to 16 bytes, sizes whole vectors).
#include "ssd.cuh"

#define THREADS (WARPS * 32)
#define STRIPS (Q / 16)
#define COLUMN_WARPS (WARPS / STRIPS)
#define COLUMNS (PT / COLUMN_WARPS)  // of Y, a warp
#define STATE_N_WARPS (NT / 16 < WARPS ? NT / 16 : WARPS)
#define STATE_P_WARPS (WARPS / STATE_N_WARPS)
#define STATE_N (NT / STATE_N_WARPS)  // of S, a warp
#define STATE_P (PT / STATE_P_WARPS)
#define X_STRIDE padded_stride<X>(PT)
#define N_STRIDE padded_stride<X>(NT)
#define X_TILE (Q * X_STRIDE)
#define N_TILE (Q * N_STRIDE)
#define STAGE (X_TILE + N_TILE)  // x and B; of C there is one tile, every strip of it renewed as soon as it has been read
#define STATE_TILE (PT * N_STRIDE)
#define STATES_KEPT (STATE_ONLY ? 0 : STATE_BUFFERS)
#define SCALARS (4 * Q + 4)  // floats of a chunk: (cs, d) a step; what is left of cs (f32); what reaches the end, of the whole chunk last
#define RUNS (SEQUENCES ? Q : 0)

#define HALF ((STRIPS + 1) / 2)
// Several warps with the same rows: each finds the scores of every COLUMN_WARPS-th tile of steps, and they share them.
#define SHARES_SCORES (COLUMN_WARPS > 1 && !STATE_ONLY)
#define SCORE_STRIDE padded_stride<X>(Q)
#define OWN_TILES ((STRIPS + COLUMN_WARPS - 1) / COLUMN_WARPS)
#define SHORT_TILES ((HALF + COLUMN_WARPS - 1) / COLUMN_WARPS)  // for strips of the first half

static_assert(WARPS % STRIPS == 0 && COLUMNS % 16 == 0 && STATE_N % 16 == 0 && STATE_P % 16 == 0, "shape");

struct SsdForwardParameters {
    const void* x;
    const void* dt;
    const void* A;
    const void* B;
    const void* C;
    const void* D;
    const void* z;
    const void* dt_bias;
    const void* initial_states;
    const void* seq_idx;
    const void* cu_seqlens;
    void* out;              // (batch, seqlen, heads, headdim)
    float* final_states;    // (batch, heads, headdim, dstate)
    void* varlen_states;    // (sequences, heads, headdim, dstate)
    float* segment_states;  // (batch, heads, segments, headdim, dstate): the finer ones
    float* segment_sums;    // (batch, heads, segments): cs of the whole segment, -infinity if the sequence changes in it
    long long x_stride[4];  // batch, step, head, column
    long long dt_stride[3];
    long long B_stride[4];  // batch, step, group, state
    long long C_stride[4];
    long long z_stride[4];
    long long initial_stride[4];
    long long D_stride[2];
    long long seq_stride[2];
    long long A_stride, bias_stride, cu_stride;
    int dt_type, A_type, D_type, bias_type, initial_type, seq_wide, cu_wide;
    int heads, group_heads, headdim, dstate, seqlen, tiles, segments, finer, segment_length, sequences, softplus;
    float dt_min, dt_max;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) ssd_forward(const SsdForwardParameters p) {
    DYNAMIC_SHARED(shared_memory);
    X* const stages = reinterpret_cast<X*>(shared_memory);
    X* const C_tile = stages + STAGES * STAGE;
    X* const states = C_tile + (STATE_ONLY ? 0 : N_TILE);
    X* const shared_scores = states + STATES_KEPT * STATE_TILE;
    float* const scalars = reinterpret_cast<float*>(shared_scores + (SHARES_SCORES ? Q * SCORE_STRIDE : 0));
    float* const skips = scalars + 2 * SCALARS;
    int* const runs = reinterpret_cast<int*>(skips + PT);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // blockIdx.x = (batch, head, tile of columns); blockIdx.y = segment.
    const int column_begin = blockIdx.x % p.tiles * PT;
    const int head = blockIdx.x / p.tiles % p.heads, batch = blockIdx.x / p.tiles / p.heads;
    const int group = head / p.group_heads;
    const int segment = blockIdx.y;
    const int begin = segment * p.segment_length, end = min(p.seqlen, begin + p.segment_length);
    const int columns = min(PT, p.headdim - column_begin);
    const i64 sequence_head = (i64)batch * p.heads + head;

    const X* const x = static_cast<const X*>(p.x) + batch * p.x_stride[0] + head * p.x_stride[2] + column_begin * p.x_stride[3];
    const X* const B = static_cast<const X*>(p.B) + batch * p.B_stride[0] + group * p.B_stride[2];
    const X* const C = static_cast<const X*>(p.C) + batch * p.C_stride[0] + group * p.C_stride[2];
    const X* const z = static_cast<const X*>(p.z) + batch * p.z_stride[0] + head * p.z_stride[2] + column_begin * p.z_stride[3];
    const i64 out_stride = (i64)p.heads * p.headdim;
    X* const out = static_cast<X*>(p.out) + (i64)batch * p.seqlen * out_stride + (i64)head * p.headdim + column_begin;

    Steps steps;
    steps.dt = p.dt;
    steps.at = batch * p.dt_stride[0] + head * p.dt_stride[2];
    steps.stride = p.dt_stride[1];
    steps.type = p.dt_type;
    steps.bias = p.dt_bias ? load_any(p.dt_bias, p.bias_type, head * p.bias_stride) : 0.0f;
    steps.A = load_any(p.A, p.A_type, head * p.A_stride);
    steps.softplus = p.softplus;
    steps.low = p.dt_min;
    steps.high = p.dt_max;
    if (!STATE_ONLY && p.D)
        for (int i = threadIdx.x; i < PT; i += THREADS)
            skips[i] = i < columns ? load_any(p.D, p.D_type, head * p.D_stride[0] + (column_begin + i) * p.D_stride[1]) : 0.0f;

    // --- the state that enters
    const int state_p = warp / STATE_N_WARPS * STATE_P, state_n = warp % STATE_N_WARPS * STATE_N;
    float state[STATE_P / 16][STATE_N / 16][2][4];
    const auto each_state = [&](auto&& action) {  // action(sums of two neighbouring states, column, state)
#pragma unroll
        for (int i = 0; i < STATE_P / 16; ++i)
#pragma unroll
            for (int j = 0; j < STATE_N / 16; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int row = 0; row < 2; ++row)
                        action(state[i][j][half] + 2 * row, state_p + i * 16 + row * 8 + g, state_n + j * 16 + half * 8 + 2 * t);
    };
    each_state([&](float* h, int, int) { h[0] = h[1] = 0.0f; });
    bool entered = false;
    if (!STATE_ONLY) {
        if (p.initial_states) {
            entered = true;
            const i64 at = batch * p.initial_stride[0] + head * p.initial_stride[1] + column_begin * p.initial_stride[2];
            each_state([&](float* h, int column, int n) {
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (column < columns && n + e < p.dstate)
                        h[e] = load_any(
                            p.initial_states, p.initial_type,
                            at + column * p.initial_stride[2] + (n + e) * p.initial_stride[3]);
            });
        }
        for (int s = 0; s < segment * p.finer; ++s) {
            entered = true;
            const i64 of = sequence_head * p.segments + s;
            const float passing = fast_exp2(p.segment_sums[of]);
            const float* const added = p.segment_states + (of * p.headdim + column_begin) * p.dstate;
            each_state([&](float* h, int column, int n) {
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (column < columns && n + e < p.dstate)
                        h[e] = fmaf(passing, h[e], added[(i64)column * p.dstate + n + e]);
            });
        }
    }
    const auto show_state = [&](X* to) {
        each_state([&](const float* h, int column, int n) {
            Pack<X, 2> pack;
            const float two[2] = {h[0], h[1]};
            from_floats(pack, two);
            store_pack<X, 2>(to + column * N_STRIDE + n, pack);
        });
    };

    // --- chunks
    int sequence = 0;  // of cu_seqlens: the first that ends after the chunk's begin
    const auto cut = [&](int from) {
        int to = min(from + Q, end);
        if (p.cu_seqlens) {
            while (sequence < p.sequences && load_integer(p.cu_seqlens, p.cu_wide, (sequence + 1) * p.cu_stride) <= from) ++sequence;
            if (sequence < p.sequences)
                to = (int)min((i64)to, load_integer(p.cu_seqlens, p.cu_wide, (sequence + 1) * p.cu_stride));
        }
        return to;
    };
    const auto fetch = [&](X* stage, int from, int to) {
        const int thread = threadIdx.x;
        fetch_tile<Q, PT, X_STRIDE, THREADS, PACKED>(thread, stage, x, p.x_stride[1], p.x_stride[3], from, to, columns);
        fetch_tile<Q, NT, N_STRIDE, THREADS, PACKED>(
            thread, stage + X_TILE, B, p.B_stride[1], p.B_stride[3], from, to, p.dstate);
        commit_copies();
    };
    const auto fetch_strip = [&](int thread, int row, int from, int to) {  // of C
        fetch_tile<16, NT, N_STRIDE, COLUMN_WARPS * 32, PACKED>(
            thread, C_tile + row * N_STRIDE, C, p.C_stride[1], p.C_stride[3], from + row, to, p.dstate);
        commit_copies();
    };
    const auto load_runs = [&](int from, int to, int (&changes)[(Q + 31) / 32]) {
        load_changes<Q, SEQUENCES>(p.seq_idx, p.seq_wide, batch * p.seq_stride[0], p.seq_stride[1], from, to, changes);
    };
    // Buffer b of the scalars belongs to chunks of parity b.
    const auto place = [&](int b, const float (&raw)[(Q + 31) / 32], const int (&changes)[(Q + 31) / 32], int count) {
        float* const here = scalars + b * SCALARS;
        place_scalars<Q, sizeof(X) == 4, SEQUENCES>(steps, raw, changes, count, here, here + 2 * Q, here + 3 * Q, runs + b * RUNS);
    };

    float total = 0.0f;  // STATE_ONLY: cs of all chunks so far
    float raw[(Q + 31) / 32];
    int changes[(Q + 31) / 32];
    int stop = begin < end ? cut(begin) : begin;
    if (begin < end) {
        fetch(stages, begin, stop);
        if (!STATE_ONLY) fetch_strip(threadIdx.x % (COLUMN_WARPS * 32), warp / COLUMN_WARPS * 16, begin, stop);
        if (warp == 0) {
            steps.load<Q>(begin, stop, raw);
            load_runs(begin, stop, changes);
            place(0, raw, changes, stop - begin);
        }
        if (entered) show_state(states);
    }
    int index = 0;
    for (int start = begin; start < end; ++index) {
        const int parity = index & 1;
        const int ended = sequence;  // the sequence of cu_seqlens that this chunk belongs to
        const bool ends = p.cu_seqlens && sequence < p.sequences &&
                          load_integer(p.cu_seqlens, p.cu_wide, (sequence + 1) * p.cu_stride) == stop;
        const bool more = stop < end;
        const int next_stop = more ? cut(stop) : stop;
        const bool keeps = more || STATE_ONLY || ends || (p.final_states && end == p.seqlen);
        wait_copies<0>();
        __syncthreads();
        X* const stage = stages + (STAGES == 2 ? parity : 0) * STAGE;
        X* const shown = states + (STATE_BUFFERS == 2 ? parity : 0) * STATE_TILE;
        const float* const sizes = scalars + parity * SCALARS;
        const float* const rest = sizes + 2 * Q;
        const float* const leaving = sizes + 3 * Q;
        const int* const run = runs + parity * RUNS;
        if (STAGES == 2 && more) fetch(stages + (parity ^ 1) * STAGE, stop, next_stop);
        const bool my_turn = more && warp == (index + 1) % WARPS;
        if (my_turn) {
            steps.load<Q>(stop, next_stop, raw);
            load_runs(stop, next_stop, changes);
        }

        const unsigned x_tile = shared_address(stage);
        const unsigned B_tile = shared_address(stage + X_TILE);
        // Strips of more rows have more to do: they change warps from chunk to chunk.
        const int own_strip = warp / COLUMN_WARPS, part = warp % COLUMN_WARPS, first_column = part * COLUMNS;
        const int strip = (index + blockIdx.x) & 1 ? STRIPS - 1 - own_strip : own_strip;
        const int first_row = strip * 16;
        float y[COLUMNS / 16][2][4];
        Fragment<X> scores[SHARES_SCORES ? 1 : STRIPS];
        if (!STATE_ONLY) {
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; ++n) clear(y[n]);
            const unsigned C_rows = shared_address(C_tile + first_row * N_STRIDE) + rows_offset<X>(N_STRIDE);
            const unsigned B_rows = B_tile + part * 16 * N_STRIDE * sizeof(X) + right_rows_offset<X>(N_STRIDE);
            const unsigned state_rows = shared_address(shown + first_column * N_STRIDE) + right_rows_offset<X>(N_STRIDE);
            // C B^T of `tiles` tiles and C S^T. No branches within, and all loads first: they are waited for once.
            const auto products = [&](auto tiles, auto with_state) {
                constexpr int count = decltype(tiles)::value;
                float sums[count ? count : 1][2][4];
#pragma unroll
                for (int j = 0; j < (count ? count : 1); ++j) clear(sums[j]);
#pragma unroll 2
                for (int k = 0; k < NT / 16; ++k) {
                    Right<X> b[count ? count : 1], s[COLUMNS / 16];
                    const Fragment<X> c = load_rows<X, N_STRIDE>(C_rows + k * 16 * sizeof(X));
#pragma unroll
                    for (int j = 0; j < count; ++j)
                        b[j] = load_right_rows<X, N_STRIDE>(B_rows + (j * COLUMN_WARPS * 16 * N_STRIDE + k * 16) * sizeof(X));
                    if (decltype(with_state)::value) {
#pragma unroll
                        for (int n = 0; n < COLUMNS / 16; ++n)
                            s[n] = load_right_rows<X, N_STRIDE>(state_rows + (n * 16 * N_STRIDE + k * 16) * sizeof(X));
                    }
#pragma unroll
                    for (int j = 0; j < count; ++j) multiply_add<TF32>(sums[j], c, b[j]);
                    if (decltype(with_state)::value) {
#pragma unroll
                        for (int n = 0; n < COLUMNS / 16; ++n) multiply_add<TF32>(y[n], c, s[n]);
                    }
                }

                // The decays. What is above the diagonal is cut off, whole tiles of it too.
                float row_cs[2], row_rest[2];
                int row_run[2];
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const int at = first_row + row * 8 + g;
                    row_cs[row] = sizes[2 * at];
                    row_rest[row] = sizeof(X) == 4 ? rest[at] : 0.0f;
                    row_run[row] = SEQUENCES ? run[at] : 0;
                    if (decltype(with_state)::value) {
                        const float entering = row_run[row] ? 0.0f : fast_exp2(row_cs[row]);
#pragma unroll
                        for (int n = 0; n < COLUMNS / 16; ++n)
#pragma unroll
                            for (int i = 0; i < 4; ++i) y[n][i / 2][row * 2 + i % 2] *= entering;
                    }
                }
#pragma unroll
                for (int j = 0; j < count; ++j) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int first = (part + j * COLUMN_WARPS) * 16 + half * 8 + 2 * t;
                        const Pack<float, 4> two = load_pack<float, 4>(sizes + 2 * first);  // cs, d of two steps
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int row = i / 2, at = first + i % 2;
                            float by = row_cs[row] - two.at[i % 2 * 2];
                            if (sizeof(X) == 4) by += row_rest[row] - rest[at];
                            by = fast_exp2(by) * two.at[i % 2 * 2 + 1];
                            const bool reaches = at <= first_row + row * 8 + g && !(SEQUENCES && run[at] != row_run[row]);
                            sums[j][half][i] = reaches ? sums[j][half][i] * by : 0.0f;
                        }
                    }
                    if (!SHARES_SCORES) scores[SHARES_SCORES ? 0 : j] = rounded<X>(sums[j]);
                }
                if (SHARES_SCORES) {
#pragma unroll
                    for (int j = 0; j < (count ? count : 1); ++j) {
                        const int tile = part + j * COLUMN_WARPS;
                        if (tile >= STRIPS) break;
#pragma unroll
                        for (int half = 0; half < 2; ++half)
#pragma unroll
                            for (int row = 0; row < 2; ++row) {
                                Pack<X, 2> pack;
                                const float two[2] = {sums[j][half][2 * row], sums[j][half][2 * row + 1]};
                                from_floats(pack, two);
                                store_pack<X, 2>(
                                    shared_scores + (first_row + row * 8 + g) * SCORE_STRIDE + tile * 16 + half * 8 + 2 * t, pack);
                            }
                    }
                }
            };
            if (OWN_TILES == 1 && part > strip)  // its tile is above the diagonal
                entered ? products(Constant<0>(), Constant<1>()) : products(Constant<0>(), Constant<0>());
            else if (!entered)
                products(Constant<OWN_TILES>(), Constant<0>());
            else if (strip < HALF)
                products(Constant<SHORT_TILES>(), Constant<1>());
            else
                products(Constant<OWN_TILES>(), Constant<1>());
            if (SHARES_SCORES)
                barrier_of<COLUMN_WARPS * 32>(1 + own_strip);
            else
                __syncwarp();
            if (more) fetch_strip(threadIdx.x % (COLUMN_WARPS * 32), first_row, stop, next_stop);
        }

        Pack<X, 4> gate[COLUMNS / 16][2];
        const int lane_column = first_column + (t & 1) * 8 + (t & ~1) * 2;
        if (GATED && !STATE_ONLY) {
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; ++n)
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const int token = start + first_row + row * 8 + g, column = lane_column + n * 16;
                    gate[n][row] = load_four<X, PACKED>(
                        z + token * p.z_stride[1] + column * p.z_stride[3], p.z_stride[3], token < stop ? columns - column : 0);
                }
        }

        // --- Y and S, both over the chunk's steps. Strips of the first half have no scores for steps of the second.
        const unsigned B_columns = B_tile + right_columns_offset<X>(N_STRIDE) + state_n * sizeof(X);
        const unsigned own_x = x_tile + right_columns_offset<X>(X_STRIDE) + first_column * sizeof(X);
        const unsigned state_x = x_tile + columns_offset<X>(X_STRIDE) + state_p * sizeof(X);
        const unsigned score_rows = shared_address(shared_scores + first_row * SCORE_STRIDE) + rows_offset<X>(SCORE_STRIDE);
        const auto accumulate = [&](auto strips, auto with_state) {
            constexpr bool keep = decltype(with_state)::value;
            if (keep) {
                const float passing = leaving[Q];
                each_state([&](float* h, int, int) {
                    h[0] *= passing;
                    h[1] *= passing;
                });
            }
#pragma unroll
            for (int k = 0; k < STRIPS; ++k) {
                const bool scored = !STATE_ONLY && k < decltype(strips)::value;
                Fragment<X> left[STATE_P / 16];
                Right<X> right[STATE_N / 16], own[COLUMNS / 16];
                if (scored) {
                    if (SHARES_SCORES) scores[0] = load_rows<X, SCORE_STRIDE>(score_rows + k * 16 * sizeof(X));
#pragma unroll
                    for (int n = 0; n < COLUMNS / 16; ++n)
                        own[n] = load_right_columns<X, X_STRIDE>(own_x + (k * 16 * X_STRIDE + n * 16) * sizeof(X));
                }
                if (keep) {
#pragma unroll
                    for (int j = 0; j < STATE_N / 16; ++j)
                        right[j] = load_right_columns<X, N_STRIDE>(B_columns + (k * 16 * N_STRIDE + j * 16) * sizeof(X));
#pragma unroll
                    for (int i = 0; i < STATE_P / 16; ++i)
                        left[i] = load_columns<X, X_STRIDE>(state_x + (k * 16 * X_STRIDE + i * 16) * sizeof(X));
                }
                if (scored) {
#pragma unroll
                    for (int n = 0; n < COLUMNS / 16; ++n) multiply_add<TF32>(y[n], scores[SHARES_SCORES ? 0 : k], own[n]);
                }
                if (keep) {
                    const Pack<float, 2> low = load_pack<float, 2>(leaving + k * 16 + 2 * t);
                    const Pack<float, 2> high = load_pack<float, 2>(leaving + k * 16 + 2 * t + 8);
#pragma unroll
                    for (int j = 0; j < STATE_N / 16; ++j) {
                        const Right<X> scaled =
                            scaled_along_rows(right[j], Float2{low.at[0], low.at[1]}, Float2{high.at[0], high.at[1]});
#pragma unroll
                        for (int i = 0; i < STATE_P / 16; ++i) multiply_add<TF32>(state[i][j], left[i], scaled);
                    }
                }
            }
        };
        const bool short_scores = entered && strip < HALF;  // of the first chunk all are there
        if (!keeps)
            short_scores ? accumulate(Constant<HALF>(), Constant<0>()) : accumulate(Constant<STRIPS>(), Constant<0>());
        else if (STATE_ONLY || short_scores)
            accumulate(Constant<HALF>(), Constant<1>());
        else
            accumulate(Constant<STRIPS>(), Constant<1>());

        // --- out: lanes of a quad trade halves, so that each has four neighbouring columns
        if (!STATE_ONLY) {
            const bool odd = t & 1;
            // One address a chunk; the compiler would find each anew.
            X* to = out + (i64)(start + first_row + g) * out_stride + lane_column;
            const X* own_rows = stage + (first_row + g) * X_STRIDE + lane_column;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const int exist = start + first_row + row * 8 + g < stop ? columns - lane_column : 0;
#pragma unroll
                for (int n = 0; n < COLUMNS / 16; ++n) {
                    const float* const low = y[n][0] + 2 * row;
                    const float* const high = y[n][1] + 2 * row;
                    const float got[2] = {
                        __shfl_xor_sync(ALL_LANES, odd ? low[0] : high[0], 1), __shfl_xor_sync(ALL_LANES, odd ? low[1] : high[1], 1)};
                    float four[4] = {odd ? got[0] : low[0], odd ? got[1] : low[1], odd ? high[0] : got[0], odd ? high[1] : got[1]};
                    if (p.D) {
                        float own[4];
                        to_floats(own, load_pack<X, 4>(own_rows + row * 8 * X_STRIDE + n * 16));
                        const Pack<float, 4> skip = load_pack<float, 4>(skips + lane_column + n * 16);
#pragma unroll
                        for (int i = 0; i < 4; ++i) four[i] = fmaf(skip.at[i], own[i], four[i]);
                    }
                    if (GATED) {
                        float own[4];
                        to_floats(own, gate[n][row]);
#pragma unroll
                        for (int i = 0; i < 4; ++i) four[i] *= silu(own[i]);
                    }
                    store_four<X, PACKED>(to + n * 16, exist - n * 16, four);
                }
                to += 8 * out_stride;
            }
        }

        if (STATE_ONLY) total += leaving[Q + 1];
        if (my_turn) place(parity ^ 1, raw, changes, next_stop - stop);
        if (!STATE_ONLY && ends) {
            X* const to = static_cast<X*>(p.varlen_states) + (((i64)ended * p.heads + head) * p.headdim + column_begin) * p.dstate;
            each_state([&](const float* h, int column, int n) {
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (column < columns && n + e < p.dstate) to[(i64)column * p.dstate + n + e] = from_float<X>(h[e]);
            });
        }
        if (STAGES == 1 || (STATE_BUFFERS == 1 && !STATE_ONLY)) __syncthreads();  // everyone has read the tiles, and the state
        if (!STATE_ONLY && more) show_state(states + (STATE_BUFFERS == 2 ? parity ^ 1 : 0) * STATE_TILE);
        if (STAGES == 1 && more) fetch(stages, stop, next_stop);
        entered = true;
        start = stop;
        stop = next_stop;
    }

    float* const kept = STATE_ONLY ? p.segment_states : end == p.seqlen ? p.final_states : nullptr;
    if (kept) {
        float* const to = kept + ((STATE_ONLY ? sequence_head * p.segments + segment : sequence_head) * p.headdim + column_begin) * p.dstate;
        each_state([&](const float* h, int column, int n) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (column < columns && n + e < p.dstate) to[(i64)column * p.dstate + n + e] = h[e];
        });
    }
    if (STATE_ONLY && column_begin == 0 && threadIdx.x == 0) p.segment_sums[sequence_head * p.segments + segment] = total;
}
