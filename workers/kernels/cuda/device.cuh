/* What the kernels need of CUDA and of a GPU's instructions, under names of ours: the tests replace this file's second
 * half by an emulation on the host, and run the same kernels there.
 *
 * A kernel takes only pointers and 64-bit numbers, so that every argument has 8 bytes. It is defined by
 *
 *     KERNEL(threads, name, arguments) { ... }
 *
 * and always launched with blocks of so many threads. SHARED(type, name, count) is memory of a block. */
#pragma once

#ifdef TANDEM_EMULATED
#include TANDEM_EMULATED
#else

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif
static_assert(sizeof(int8_t) == 1 && sizeof(uint8_t) == 1, "8 bits");
static_assert(sizeof(uint16_t) == 2 && sizeof(int32_t) == 4 && sizeof(uint32_t) == 4, "16 and 32 bits");
static_assert(sizeof(int64_t) == 8 && sizeof(uint64_t) == 8, "64 bits");
static_assert(sizeof(void *) == 8, "an address is an argument of 8 bytes");

#define DEVICE static __device__ __forceinline__
#define METHOD __device__ __forceinline__
#define KERNEL(threads, name, ...) extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
#define SHARED(type, name, count) __shared__ type name[count]
#define ALL_LANES 0xFFFFFFFFu

/* Weights are read once: they do not displace activations from the first cache. */
DEVICE uint32_t read_once(const uint32_t *from) {
    uint32_t word;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
}
DEVICE uint4 read_once(const uint4 *from) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    return words;
}
DEVICE uint32_t read_once(const uint16_t *from) {
    uint32_t half; /* loaded into a whole register: widened later it would have to be waited for */
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=r"(half) : "l"(from));
    return half;
}
DEVICE uint32_t read_once(const uint8_t *from) {
    uint32_t byte;
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(byte) : "l"(from));
    return byte;
}

/* The number of a binary16's bits. */
DEVICE float half_number(uint32_t bits) {
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"((uint16_t)bits));
    return number;
}

/* Four bytes of the eight in `low` and `high`. Each of the lowest four nibbles of `choice` names one by its lower three
 * bits; with the upper bit set it gives the byte's sign, 0x00 or 0xFF, instead of the byte. */
DEVICE uint32_t chosen_bytes(uint32_t low, uint32_t high, uint32_t choice) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(choice));
    return bytes;
}

/* Tells a warp whether it is the last of so many, of different blocks of threads, to come here: it then sees what all of
 * them have written. The number of those that have come is 0 before and afterwards. */
DEVICE bool last_of(int32_t *arrived, int number) {
    int before = 0;
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) before = atomicAdd(arrived, 1);
    if (__shfl_sync(ALL_LANES, before, 0) != number - 1) return false;
    __threadfence();
    if (threadIdx.x % 32 == 0) *arrived = 0;
    return true;
}

/* d += A B for a warp: A int8 [16, 32] and B int8 [32, 8] in fragments as PTX defines them for mma.m16n8k32. */
DEVICE void multiply_add(int32_t *d, const uint32_t *a, const uint32_t *b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif
