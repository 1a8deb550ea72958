/* Expert kernels: the functions that every variant's library exports, plain C called through ctypes.
 *
 * A variant (avx512.c, avx2.c, portable.c) defines how one block of 16 outputs is computed for a few rows,
 * and then includes body.h, which has the rest: loops over blocks, tiles and rows, the inner activations.
 *
 * shm/formats.py and shm/blocks.py draw the bytes of weights. Arrays are row-major; sizes are counted in numbers
 * unless they say bytes. Nothing here allocates: the caller does, and answers for the sizes. Numbers within arrays that
 * say what is read or written (rows, offsets, experts, tiles, positions) are checked here, before anything is computed: a function
 * that returns int returns FINE, or why it has done nothing.
 *
 * Integer formats. Activations are quantized to int8 by groups of inputs; each group has a scale and the sum of
 * its codes, next to each other ("factors"). For each group of a block of outputs
 *
 *     y += (activation scale * weight scale) * (dot - zero * sum)
 *
 * where dot is the exact integer product of the codes. E2M1 codes are taken as 12 more than twice their values, 0 to 24;
 * what multiplies y in the end for that, and a matrix's factor, is in records.h and blocks.h. Groups are added in their
 * order and rows do not mix: a row's result depends neither on how many rows there are nor on how many threads.
 *
 * bf16. Inputs are rounded to bf16; products are added in float32, as in the formats float32 and FP8, which round nothing.
 */
#pragma once

#include <stdint.h>

enum { BLOCK = 16 }; /* outputs interleaved in the integer formats */
enum { ROWS = 8 };   /* most rows that one read of a block is applied to */
enum { KV_BLOCK = 64 };  /* tokens of a block of the KV cache */
enum { KV_RUN = 128 };   /* numbers of a row of it in int8 that share a scale */
enum { STRIP = 128 }; /* rows: their activations stay in a core's cache while all blocks are multiplied */

/* Matrix units: rows of a tile. A tile takes about as long however many of its rows are used. */
enum { TALL_ROWS = 16 };
#ifndef UNIT_ROWS
#define UNIT_ROWS 12 /* of one product, from which matrix units compute it, in variants that have them; a test has others */
#endif

enum { INT2 = 2, INT4 = 4, INT8 = 8, BF16 = 16, FLOAT32 = 32, FP8 = 64 }; /* which format: bits of a weight, FP8 has 8 */

/* Scales of an integer format. OWN: bf16 beside zeros in bf16, or float32 of INT8. F16: binary16; F16_ZEROS: the same
 * beside zeros in bf16. E8M0, E4M3: in each record those of two groups, whose codes are E2M1. */
enum { SCALES_OWN, SCALES_F16, SCALES_F16_ZEROS, SCALES_E8M0, SCALES_E4M3 };

/* Prefetches memory that is read once, into the second cache. Other hints halve the pace on some processors; where this
 * one was measured (docs/kernels.md), no other hint or distance is faster by more than measurements differ, but for one row
 * on some (avx512.c). The address may lie beyond the end of memory: then nothing happens. */
#define PREFETCH(at) __builtin_prefetch((const char *)(at), 0, 2)
enum { AHEAD = 8192 }; /* bytes: how far ahead of its use */

/* What experts compute between their matrices: shm/expert_math.py has the formula and what its numbers mean. */
enum { SWIGLU, GLU, RELU2 }; /* SWIGLU is GLU with its numbers, RELU2 has no gate */
struct expert_math {
    int64_t kind;
    int64_t biases; /* bytes from a tile's beginning to gate's biases, unless RELU2, and then up's, float32 [channels] each;
                     * where gate and down lie by channel, from a channel's beginning to gate's. 0: there are none */
    float alpha, cubic, gate_max, up_limit, offset, gate_softcap, up_softcap, unused;
};

struct weights {
    int64_t bits;
    int64_t scales;   /* OWN for bf16, float32 and FP8 */
    int64_t group;    /* inputs that share a scale; 1 for bf16, float32 and FP8 */
    int64_t inputs;   /* of a matrix; H of tiles */
    int64_t outputs;  /* of a matrix; H of tiles */
    int64_t channels; /* T of one tile, in whole records; 0 for a matrix */
    int64_t factors;  /* bytes from a matrix's or a tile's beginning to the float32 factor of each of its matrices; 0: there
                       * are none */
    int64_t channel_bits; /* of a tile's gate and down, where they lie by channel and `bits` are up's: INT4, INT8 or
                           * BF16 (shm/floe.py); 0: a tile is matrices of `bits` */
    int64_t tile_bytes;   /* of a tile that is matrices */
    struct expert_math math; /* of tiles */
};

/* Integer formats: codes int8 [rows, padded], factors float32 [rows, padded / group, 2]; `padded` is the number
 * of inputs in whole records. Others: codes float32 [rows, inputs], in bf16 rounded to it; no factors. */
struct activations {
    const void *codes;
    const float *factors;
};

/* Which channels a row keeps (shm/mask.py), and what that left out. */
struct mask {
    float threshold, share;
};
struct tally {
    double mass, left;
    int64_t kept, channels;
};

enum { FINE, BAD_ROWS, BAD_OFFSETS, BAD_ITEMS, SMALL_BUFFERS, BAD_POSITION, BAD_LAYER, BAD_SIZES, BAD_ORDER,
       CRASHED, BAD_MASK, BAD_GENERATION };

struct team; /* threads that share one computation; NULL is the calling thread alone */

/* Raised with every change of the functions below, so that a library compiled from an older checkout is not used. */
int tandem_kernels_version(void);

/* 1 if this CPU has what the variant was compiled for, 0 if not, -1 if the system does not permit its use. */
int tandem_supported(void);

/* x float32 [rows, inputs] as activations; padding of the inputs to whole records becomes 0. */
void tandem_quantize(const struct weights *weights, const float *x, int64_t rows, void *codes, float *factors);

/* Bytes of scratch that tandem_tiles needs for `rows` rows; it is 64-byte aligned. */
int64_t tandem_scratch(const struct weights *weights, int64_t rows);

/* y float32 [count, H] = the sum of the outputs of `number` consecutive tiles for the rows chosen[0..count) of x, which
 * has `rows`. */
int tandem_tiles(struct team *team, const struct weights *weights, const uint8_t *tiles, int64_t number,
                 const struct activations *x, int64_t rows, const int32_t *chosen, int64_t count, float *y,
                 void *scratch);

/* A Work of items [number, 3]: expert, first tile, end. Item i has the rows rows[offsets[i]..offsets[i + 1]) of x,
 * ascending, and their weights; offsets [number + 1]. */
struct work {
    const int32_t *items, *offsets, *rows;
    const float *row_weights;
    int64_t number, row_number; /* `row_number` of rows and row_weights */
    int64_t x_rows;             /* of x */
    int64_t experts, tiles;     /* of the layer */
};

/* A store's tiles, and what computes them. */
struct host {
    struct team *team;
    struct weights weights;
    const uint8_t *tiles_data; /* of the first layer's first expert */
    const uint8_t *heads_data; /* the same, where tiles have heads; otherwise head_stride and head_bytes are 0 */
    int64_t generation;             /* of the process, which computes no descriptor of another one */
    int64_t layers, experts, tiles; /* of the store, of a layer, of an expert */
    int64_t layer_bytes, expert_bytes, tile_bytes; /* from one to the next */
    int64_t head_stride, head_bytes;               /* of an expert's heads, of a tile's */
    int64_t up_biases;        /* bytes from an expert's heads to up's biases, float32 [tiles, channels]; 0: there are none */
    volatile uint64_t *ticks; /* incremented after each tile, as a sign of progress; may be NULL */
    void *memory;             /* 64-byte aligned */
    int64_t memory_bytes, needed;
};

/* The Work of a descriptor (shm/descriptor.py) of `numbers` numbers of 4 bytes: checks every number of it, then writes y
 * [its rows, H] and what its mask has left out. The same bits as tandem_tiles item by item: the sum over the items of their
 * rows' weights times the sum of their tiles' outputs. Nothing outside the given memory is read or written, whatever the
 * descriptor says, as long as it does not change meanwhile. SMALL_BUFFERS: host->memory must have host->needed bytes. */
int tandem_work(struct host *host, const void *descriptor, int64_t numbers, const float *x, int64_t x_numbers, float *y,
                int64_t y_numbers, struct tally *tally);

/* The same without a team; returns CRASHED where it would have crashed, for example over tiles that cannot be read. For
 * one thread of a process. */
int tandem_guarded_work(struct host *host, const void *descriptor, int64_t numbers, const float *x, int64_t x_numbers,
                        float *y, int64_t y_numbers, struct tally *tally);

/* Channels of tiles that have heads. x [rows, inputs], whose activations are `of`, as gate rows take it: into `to`, of
 * tandem_gate_x_bytes a row, 64-byte aligned. */
int64_t tandem_gate_x_bytes(const struct weights *weights);
void tandem_arrange_gate_x(const struct weights *weights, const float *x, const struct activations *of, int64_t rows,
                           uint8_t *to);

/* y float32 [count, H] = for the rows chosen[0..count) of x, which has `rows`, the sum over `channels` records of
 * f(gate . x, u) * down; u float32 [count, channels], with its bias, 0 where a row does not keep a channel. Records that no
 * row keeps are not read. */
int tandem_channels(struct team *team, const struct weights *weights, const uint8_t *records, int64_t channels,
                    const uint8_t *gate_x, int64_t rows, const int32_t *chosen, int64_t count, const float *u,
                    float *y, void *scratch);
int64_t tandem_channels_scratch(const struct weights *weights, int64_t channels, int64_t rows);

/* The sum of `bytes` bytes, a multiple of 64, as 64-bit numbers: its time is that of reading memory. */
uint64_t tandem_read(struct team *team, const uint8_t *memory, int64_t bytes);

/* --- a decoder layer up to its routed experts, for single tokens of several sequences ----------------------- */

struct matrix {
    struct weights of; /* any format; FLOAT32, BF16 and FP8 are row-major [outputs, inputs] */
    const void *data;
    const float *bias; /* [outputs], or NULL */
};

/* y [rows, outputs] = x @ W.T + bias. BF16 rounds x to bf16; products are added in float32. `scratch`, 64-byte
 * aligned, has tandem_product_scratch bytes. `spin_ns`: nanoseconds for which the team's threads spin for the next call
 * before they sleep. */
void tandem_product(struct team *team, const struct matrix *matrix, const float *x, int64_t rows, float *y,
                    void *scratch, int64_t spin_ns);
int64_t tandem_product_scratch(const struct matrix *matrix, int64_t rows);

struct norm { /* RMS norm, or with a bias LayerNorm */
    const float *weight, *bias;
    float eps;
};

/* The KV cache. A stream (keys, values, or latents) of a layer is one slab for all sequences, [blocks, heads, KV_BLOCK,
 * width], of `bits` FLOAT32, BF16 or INT8. In INT8 a further slab, float32 [blocks, heads, KV_BLOCK, runs], has the scale of
 * each run of KV_RUN numbers, of which the last may be shorter: the largest magnitude / 127; codes are rounded half to even.
 * Streams are then addresses of numbers and of scales in turns. A sequence has a table of block numbers, the same in all
 * slabs: its token t lies in block table[t / KV_BLOCK], at t % KV_BLOCK. `capacity`: KV_BLOCK times the table's length.
 *
 * FLOAT32 is multiplied in float32. BF16 and INT8 are multiplied as bf16 by queries that are rounded to bf16, and so are the
 * weights of values, times their scales; products are added in float32.
 *
 * Attention of a single token: its keys and values are stored in the cache; it attends to itself and to the tokens
 * cached before. */
struct grouped { /* query heads in groups that share keys and values */
    int64_t bits, heads, kv_heads, width;
    int64_t rope;   /* the first numbers of a head, which are rotated */
    int64_t gated;  /* 1: a head's output is scaled by the sigmoid of gates, which lie before all queries */
    int64_t window; /* most tokens attended to, the new one included; 0: all */
    int64_t normed; /* RMS norm of queries and keys: 0 none, 1 of each head, 2 of all heads together */
    const float *query_norm, *key_norm;
    const float *sinks;     /* [heads], or NULL: each joins its head's softmax as the score of a value of 0 */
    float eps, clip, scale; /* clip 0: none */
};

/* `count` new tokens of a sequence, the first at `position`, in the same way: qkv [count, (heads + 2 kv_heads) * width],
 * after the gates if there are any, changed in place; `streams`: the layer's, of keys and then of values; `blocks`: the
 * sequence's table; out [count, heads * width]; cosines and sines [count, rope]. `scratch`, 64-byte aligned, has
 * tandem_span_scratch bytes for each thread of the team. A token's bits depend on no token after it whose numbers are
 * finite, nor on how many come with it. */
int64_t tandem_span_scratch(const struct grouped *grouped);
int tandem_span(struct team *team, const struct grouped *grouped, float *qkv, const float *cosines,
                const float *sines, char *const *streams, const int32_t *blocks, int64_t capacity, int64_t position,
                int64_t count, float *out, void *scratch);

struct latent { /* keys and values are expanded from one cached vector; for a single token, the query is instead */
    int64_t bits, heads, rank, nope, rope, value;
    int64_t query_rank;      /* of the queries' own latent; 0: none */
    const float *query_norm; /* [query_rank] */
    const float *norm;       /* [rank], of the latent */
    const void *expansion;   /* [heads, nope + value, rank], FLOAT32 as the cached numbers are, or BF16 */
    float eps, scale;
};

/* The gated delta rule in the place of attention: for each head of values a matrix S [key_dim, value_dim], of which a
 * token makes S = d S + k (b (v - d S'k))' and takes S'q, with b the sigmoid of its rate and d = exp(decay * softplus(its
 * decay + decay_bias)). Then RMS norm of each head, times silu(z). Each head of keys serves value_heads / key_heads. */
struct delta {
    int64_t key_heads, value_heads, key_dim, value_dim;
    int64_t taps;             /* of the convolution that queries, keys and values go through first, then silu */
    const float *tap_weights; /* [taps, queries, keys and values], the newest token's last */
    const float *decay, *decay_bias; /* [value_heads], at most 0 */
    const float *norm;               /* [value_dim] */
    float eps;
};

/* Attention of one new token of a sequence on given queries, for layers that are computed elsewhere: all keys and values,
 * its own included, are in the cache. */
struct heads {
    int64_t bits, heads, kv_heads, key_width, value_width;
    int64_t latent; /* 1: there is one stream, and a value is the first numbers of its key */
    int64_t window; /* as in struct grouped, and so are the following */
    const float *sinks;
    float scale;
};

/* out [heads, value_width] of q [heads, key_width]; streams of its layer. The token has `position` others before it.
 * `scratch`, 64-byte aligned, has tandem_attend_scratch bytes, where it attends to at most `tokens`. */
int64_t tandem_attend_scratch(const struct heads *heads, int64_t threads, int64_t tokens);
int tandem_attend(struct team *team, const struct heads *heads, const float *q, char *const *streams,
                  const int32_t *blocks, int64_t capacity, int64_t position, float *out, void *scratch);

struct layer { /* pointers to what a layer does not have are NULL */
    int64_t hidden, experts;
    struct norm attention_norm, mlp_norm;
    const struct grouped *grouped; /* one of these three */
    const struct latent *latent;
    const struct delta *delta;
    const struct matrix *first; /* gates, queries, keys and values; latent: queries or their latent, and the latent;
                                 * delta: queries, keys, values, z, rates, decays */
    const struct matrix *query; /* from the queries' latent */
    const struct matrix *output;
    const float *router;           /* [experts, hidden] */
    const float *router_bias;      /* [experts] */
    const struct matrix *up, *down; /* a feed-forward block for every row, [2 I, hidden] and [hidden, I]: the shared
                                     * experts, or without a router the layer's dense block */
    const float *gate;              /* [hidden], scales the block's output by sigmoid(gate . x) */
};

struct token {
    const float *cosines, *sines; /* [rope] rotate number i with number i + rope / 2 (RoPE); the sines carry the
                                   * halves' signs */
    char *const *streams;         /* [layers, streams of a layer]: of keys and then of values, or of latents (heads 1, width
                                   * rank + rope) */
    const int32_t *blocks;        /* the sequence's table */
    char *const *states;          /* of all layers four: of the delta rule its inputs [taps - 1, queries, keys and values]
                                   * of the tokens before and its matrices; then the same, written, after the token */
    int64_t capacity, position;   /* `position`: tokens before it */
};

struct step {
    int64_t rows;
    const struct token *tokens; /* [rows], each of another sequence */
    const float *h;             /* [rows, hidden], the residual stream */
    float *out;                 /* written: [rows, hidden], h after the attention, and after a dense block */
    float *x;                   /* written: [rows, hidden], the normalised input of router and experts */
    float *logits;              /* written: [rows, experts], the router's; NULL: not wanted */
    float *shared;              /* written: [rows, hidden], the output of the shared experts */
    void *scratch;              /* 64-byte aligned */
    int64_t scratch_bytes;
};

/* Bytes of scratch; `threads` of the team, `tokens` the most that a row attends to. */
int64_t tandem_layer_scratch(const struct layer *layer, int64_t rows, int64_t threads, int64_t tokens);

/* Layer number `index` of the decoder. Rows do not mix: a row's bits depend neither on the other rows nor on the number
 * of threads. */
int tandem_layer(struct team *team, const struct layer *layer, int64_t index, const struct step *step);

/* out [rows, width] = x / sqrt(mean(x^2) + eps) * weight, row by row. */
void tandem_rms_norm(const float *x, const float *weight, int64_t rows, int64_t width, float eps, float *out);

/* A team of `threads` threads, the caller included. NULL if the system refuses a thread. */
struct team *tandem_team_create(int64_t threads);

/* Nanoseconds for which the threads spin after every computation before they sleep; 0 at first. */
void tandem_team_linger(struct team *team, int64_t nanoseconds);

void tandem_team_destroy(struct team *team);
