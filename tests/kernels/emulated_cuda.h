/* A GPU on one thread of the host: the kernels of workers/kernels/cuda, compiled as C++ with
 * -DTANDEM_EMULATED='"emulated_cuda.h"', and `emulated_launch`, which runs one.
 *
 * Each thread of a block is a fiber. Fibers run one after the other, in an order drawn anew for every block, and only
 * change at barriers, shuffles and matrix instructions; so a missing barrier gives wrong numbers in some orders. Memory
 * of a block begins as NaN. What a GPU leaves undefined ends the process with a reason: a lane that has ended or never
 * arrives at a barrier, a block of another size than the kernel's, reads that are not aligned. */
#pragma once

/* Of C: the containers of C++ take longer to compile than the kernels. */
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#define DEVICE static inline
#define METHOD inline
#define ALL_LANES 0xFFFFFFFFu

namespace emulation {

enum { LANES_OF_WARP = 32, MOST_THREADS = 1024, MOST_KERNELS = 64, STACK = 1 << 17, MOST_SHARED = 48 << 10 };

struct position {
    unsigned x;
};

[[noreturn]] static void refuse(const char *what) {
    fprintf(stderr, "emulated GPU: %s\n", what);
    __builtin_abort();
}

/* Where threads wait for each other. What they hand over is kept twice, because the first thread that goes on may arrive
 * at the next barrier before the last one has read. */
struct barrier {
    int members = 0, arrived = 0;
    unsigned turn = 0;
    uint32_t given[2][LANES_OF_WARP][8] = {};
};

struct fiber {
    ucontext_t start;
    jmp_buf state;
    bool begun, ended;
    size_t shared;
};

struct kernel {
    const char *name;
    unsigned threads;
    void (*unpacked)(void **arguments);
};

static kernel kernels[MOST_KERNELS];
static unsigned defined;

static fiber fibers[MOST_THREADS];
static char stacks[MOST_THREADS][STACK]; /* pages that no fiber has used take no memory */
static barrier warps[MOST_THREADS / LANES_OF_WARP], whole;
static unsigned order[MOST_THREADS];
alignas(16) static char shared[MOST_SHARED];
static const kernel *launched;
static void **given;
static jmp_buf scheduler;
static ucontext_t origin;
static unsigned running, moves; /* `moves`: whether a round of all fibers has changed anything */
static position thread, block, size, grid;

static uint32_t random_number() { /* a xorshift */
    static uint32_t state = 1;
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return state;
}

static void give_way() {
    if (!_setjmp(fibers[running].state)) _longjmp(scheduler, 1);
}

static unsigned arrive(barrier &at) {
    unsigned turn = at.turn;
    moves++;
    if (++at.arrived == at.members)
        at.arrived = 0, at.turn++;
    else
        while (at.turn == turn) give_way();
    return turn;
}

static void leave(barrier &at) {
    if (--at.members > 0 && at.arrived == at.members) at.arrived = 0, at.turn++;
}

/* A fiber runs one block's thread after the other: to begin a fiber takes two calls of the system. */
static void run_fiber() {
    for (;;) {
        launched->unpacked(given);
        fibers[running].ended = true, moves++;
        leave(whole);
        barrier &warp = warps[running / LANES_OF_WARP];
        warp.members--;
        if (warp.arrived) refuse("a lane has ended that others of its warp wait for");
        give_way();
    }
}

static void run_block() {
    volatile unsigned left = size.x;
    whole.members = (int)size.x, whole.arrived = 0;
    for (unsigned w = 0; w < size.x / LANES_OF_WARP; w++) warps[w].members = LANES_OF_WARP, warps[w].arrived = 0;
    for (unsigned i = 0; i < size.x; i++) fibers[i].ended = false, fibers[i].shared = 0;
    memset(shared, 0xFF, sizeof shared);
    for (unsigned i = size.x - 1; i > 0; i--) {
        unsigned &other = order[random_number() % (i + 1)], moved = order[i];
        order[i] = other, other = moved;
    }
    while (left) {
        moves = 0;
        for (unsigned at = 0; at < size.x; at++) {
            volatile unsigned next = at; /* kept over the jump */
            fiber &f = fibers[order[at]];
            if (f.ended) continue;
            running = thread.x = order[at];
            if (!_setjmp(scheduler)) {
                if (f.begun) _longjmp(f.state, 1);
                f.begun = true;
                getcontext(&f.start);
                f.start.uc_stack.ss_sp = stacks[running], f.start.uc_stack.ss_size = STACK;
                f.start.uc_link = &origin;
                makecontext(&f.start, run_fiber, 0);
                setcontext(&f.start);
            }
            at = next;
            if (fibers[order[at]].ended) left = left - 1;
        }
        if (!moves && left) refuse("threads wait for others that never arrive");
    }
}

/* Memory of the block; every thread asks in the same order. */
[[maybe_unused]] static void *block_memory(size_t bytes) {
    fiber &f = fibers[running];
    size_t at = f.shared;
    f.shared += (bytes + 15) / 16 * 16;
    if (f.shared > MOST_SHARED) refuse("more memory of a block than every GPU has");
    return shared + at;
}

static barrier &here() { return warps[running / LANES_OF_WARP]; }

template <class T> T exchanged(T value, unsigned from) {
    barrier &warp = here();
    if (warp.members != LANES_OF_WARP) refuse("a shuffle with a lane that has ended");
    memcpy(warp.given[warp.turn % 2][running % LANES_OF_WARP], &value, sizeof value);
    unsigned turn = arrive(warp);
    T taken;
    memcpy(&taken, warp.given[turn % 2][from % LANES_OF_WARP], sizeof taken);
    return taken;
}

template <size_t... I> struct indices {};
template <size_t N, size_t... I> struct indices_below : indices_below<N - 1, N - 1, I...> {};
template <size_t... I> struct indices_below<0, I...> {
    typedef indices<I...> all;
};

/* unpack<f>::call(arguments) calls a kernel. */
template <auto f> struct unpack;
template <class... A, void (*f)(A...)> struct unpack<f> {
    static_assert(((sizeof(A) == 8 || sizeof(A) == 3840) && ...), "an argument has 8 bytes, or is tables");
    template <size_t... I> static void with(void **arguments, indices<I...>) {
        f(*static_cast<A *>(arguments[I])...);
    }
    static void call(void **arguments) { with(arguments, typename indices_below<sizeof...(A)>::all()); }
};

static bool define(const char *name, unsigned threads, void (*unpacked)(void **)) {
    if (defined == MOST_KERNELS) refuse("more kernels than there is room for");
    kernels[defined++] = {name, threads, unpacked};
    return true;
}

template <class T> static T aligned(const T *from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) refuse("a read that is not aligned");
    return *from;
}

static void launch(const char *name, unsigned blocks, unsigned threads, void **arguments) {
    launched = nullptr, given = arguments;
    for (unsigned i = 0; i < defined; i++)
        if (!strcmp(kernels[i].name, name)) launched = &kernels[i];
    if (!launched) refuse("no such kernel");
    if (threads != launched->threads || threads % LANES_OF_WARP) refuse("another size of blocks than the kernel's");
    if (threads > MOST_THREADS) refuse("more threads than a block can have");
    size.x = threads, grid.x = blocks;
    for (unsigned i = 0; i < threads; i++) order[i] = i;
    for (unsigned b = 0; b < blocks; b++) block.x = b, run_block();
}

} // namespace emulation

extern "C" void emulated_launch(const char *name, int64_t blocks, int64_t threads, void **arguments) {
    emulation::launch(name, (unsigned)blocks, (unsigned)threads, arguments);
}

#define threadIdx emulation::thread
#define blockIdx emulation::block
#define blockDim emulation::size
#define gridDim emulation::grid
#define SHARED(type, name, count) type *name = static_cast<type *>(emulation::block_memory(sizeof(type) * (count)))
#define KERNEL(threads, name, ...)                                                                               \
    static void name(__VA_ARGS__);                                                                               \
    [[maybe_unused]] static bool defined_##name = emulation::define(#name, threads, emulation::unpack<name>::call);                       \
    static void name(__VA_ARGS__)

struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

DEVICE void __syncthreads() { emulation::arrive(emulation::whole); }
template <class T> static T __shfl_xor_sync(uint32_t, T value, int other) {
    return emulation::exchanged(value, threadIdx.x ^ (unsigned)other);
}
DEVICE void __syncwarp() { emulation::exchanged(0, 0); }
[[maybe_unused]] static bool last_of(int32_t *arrived, int number) {
    bool first = threadIdx.x % 32 == 0;
    __syncwarp();
    bool last = emulation::exchanged(first ? ++*arrived : 0, 0) == number;
    if (first && last) *arrived = 0;
    return last;
}
DEVICE float __uint_as_float(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
DEVICE float __int_as_float(int32_t bits) { return __uint_as_float((uint32_t)bits); }
DEVICE uint32_t __float_as_uint(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}
DEVICE int32_t __float_as_int(float number) { return (int32_t)__float_as_uint(number); }
DEVICE int __dp4a(int a, int b, int sum) {
    for (int k = 0; k < 4; k++) sum += (int8_t)(a >> 8 * k) * (int8_t)(b >> 8 * k);
    return sum;
}
DEVICE float half_number(uint32_t bits) {
    uint32_t size = bits & 0x7FFF, exponent = size < 0x7C00 ? 112u << 23 : 224u << 23;
    float number = size < 0x400 ? __builtin_ldexpf((float)size, -24) : __uint_as_float((size << 13) + exponent);
    return bits & 0x8000 ? -number : number;
}
DEVICE uint32_t chosen_bytes(uint32_t low, uint32_t high, uint32_t choice) { /* PTX's prmt */
    uint64_t both = (uint64_t)high << 32 | low;
    uint32_t bytes = 0;
    for (int k = 0; k < 4; k++) {
        uint32_t name = choice >> 4 * k & 15, byte = (uint32_t)(both >> 8 * (name & 7)) & 255;
        if (name & 8) byte = byte & 128 ? 255 : 0;
        bytes |= byte << 8 * k;
    }
    return bytes;
}
template <class T> static T __ldg(const T *from) { return emulation::aligned(from); }
DEVICE uint4 read_once(const uint4 *from) { return emulation::aligned(from); }
DEVICE uint32_t read_once(const uint32_t *from) { return emulation::aligned(from); }
DEVICE uint32_t read_once(const uint16_t *from) { return emulation::aligned(from); }
DEVICE uint32_t read_once(const uint8_t *from) { return *from; }
DEVICE float __ldcv(const float *from) { return emulation::aligned(from); }
DEVICE float __fadd_rn(float a, float b) { return a + b; }
DEVICE float __fsub_rn(float a, float b) { return a - b; }
DEVICE float __fmul_rn(float a, float b) { return a * b; }
DEVICE float __fdiv_rn(float a, float b) { return a / b; }
DEVICE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

/* PTX's m16n8k32 of int8. Lane 4 g + t holds of A the rows g (registers 0 and 2) and g + 8 (1 and 3), of each the columns
 * 4 t.. (0 and 1) and 16 + 4 t.. (2 and 3); of B column g, rows 4 t.. and 16 + 4 t..; of D rows g (0 and 1) and g + 8,
 * columns 2 t and 2 t + 1. */
DEVICE void multiply_add(int32_t *d, const uint32_t *a, const uint32_t *b) {
    emulation::barrier &warp = emulation::here();
    if (warp.members != 32) emulation::refuse("a product with a lane that has ended");
    unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t *given = warp.given[warp.turn % 2][lane];
    memcpy(given, a, 16), memcpy(given + 4, b, 8);
    unsigned turn = emulation::arrive(warp);
    for (unsigned c = 0; c < 4; c++)
        for (unsigned k = 0; k < 8; k++) { /* four columns of A each */
            unsigned of_a = 4 * g + k % 4, of_b = 4 * (2 * t + c % 2) + k % 4;
            uint32_t left = warp.given[turn % 2][of_a][c / 2 + 2 * (k / 4)];
            uint32_t right = warp.given[turn % 2][of_b][4 + k / 4];
            d[c] = __dp4a((int)left, (int)right, d[c]);
        }
}
