// Runs the threads of a grid, for tests: see cuda_on_cpu.hpp.
//
// Note on threads. Blocks run one after another. A thread is a coroutine with a stack of its own; it runs until it comes
// to a barrier (__syncthreads, __syncwarp, or any exchange within a warp) and is resumed when all others have come there.
// If they never do, the kernel is wrong, and the program says so and aborts. A thread that meets no barrier hands its
// coroutine to the next one, so kernels without barriers cost a function call a thread.
//
// Shared memory that a launch asks for is filled with 0xFF bytes (NaN) before every block; what lies behind it always is,
// and a kernel that writes to the first bytes of that is wrong, too.
#include "cuda_on_cpu.hpp"
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <ucontext.h>
#include <vector>

Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {
alignas(128) char dynamic_memory[256 << 10];

struct Fiber {
    ucontext_t start;
    jmp_buf place;
    std::unique_ptr<char[]> stack;
    bool begun = false;
    unsigned thread = 0, parity = 0;
    Wait wait = IDLE;
};
static const size_t STACK = 256 << 10, WARPS = 32;
static std::vector<std::unique_ptr<Fiber>> fibers;
static Fiber* current;
static jmp_buf scheduler;
static unsigned next_thread;
static void (*body)(void**);
static void** arguments;
static Message sets[2][1024];

void pause_for(Wait wait) {
    Fiber* self = current;
    self->wait = wait;
    if (!_setjmp(self->place)) _longjmp(scheduler, 1);
}
static void work() {
    for (;;) {
        while (next_thread < blockDim.x) {
            current->thread = next_thread++, current->parity = 0;
            threadIdx.x = current->thread;
            body(arguments);
        }
        pause_for(IDLE);
    }
}
static void resume(Fiber* fiber) {
    current = fiber;
    fiber->wait = RUNNING;
    if (_setjmp(scheduler)) return;
    if (!fiber->begun) {
        fiber->begun = true;
        // Tops of stacks that are pages apart would share their lines of a cache.
        static size_t shift = 0;
        fiber->stack.reset(new char[STACK + 4096]);
        getcontext(&fiber->start);
        fiber->start.uc_stack.ss_sp = fiber->stack.get() + (shift = (shift + 320) % 4096), fiber->start.uc_stack.ss_size = STACK;
        makecontext(&fiber->start, work, 0);
        setcontext(&fiber->start);
    }
    threadIdx.x = fiber->thread;
    _longjmp(fiber->place, 1);
}
static void run_block(size_t shared) {
    next_thread = 0;
    memset(dynamic_memory, 0xff, shared);
    // Each coroutine takes threads until one of them waits: so those that wait are the first `used`, in the order of their threads.
    size_t used = 0, begins[WARPS + 1], warps = (blockDim.x + 31) / 32;
    while (next_thread < blockDim.x) {
        if (used == fibers.size()) fibers.emplace_back(new Fiber);
        resume(fibers[used].get());
        if (fibers[used]->wait != IDLE) used++;
    }
    for (size_t warp = 0, at = 0; warp <= warps; warp++) {
        while (at < used && fibers[at]->thread < 32 * warp) at++;
        begins[warp] = at;
    }
    for (;;) {
        bool alive = false, moved = false;
        for (size_t warp = 0; warp < warps; warp++) {
            bool here = false, ready = true;
            for (size_t i = begins[warp]; i < begins[warp + 1]; i++)
                if (fibers[i]->wait != IDLE) here = true, ready = ready && fibers[i]->wait == FOR_WARP;
            alive = alive || here;
            if (!here || !ready) continue;
            moved = true;
            for (size_t i = begins[warp]; i < begins[warp + 1]; i++) if (fibers[i]->wait != IDLE) resume(fibers[i].get());
        }
        if (!alive) return;
        if (moved) continue;
        for (size_t i = 0; i < used; i++)
            if (fibers[i]->wait == FOR_WARP) {
                fprintf(stderr, "thread %u waits at a barrier that others do not come to\n", fibers[i]->thread);
                abort();
            }
        for (size_t i = 0; i < used; i++) if (fibers[i]->wait != IDLE) resume(fibers[i].get());
    }
}
static void check_behind(size_t shared) {
    for (size_t i = shared; i < shared + 256 && i < sizeof dynamic_memory; i++)
        if (dynamic_memory[i] != (char)0xff) {
            fprintf(stderr, "a kernel wrote to byte %zu of %zu bytes of shared memory\n", i, shared);
            abort();
        }
    memset(dynamic_memory, 0xff, shared);
}
void run(Dim3 grid, unsigned threads, size_t shared, void (*kernel)(void**), void** args) {
    static bool fresh = true;
    if (fresh) memset(dynamic_memory, 0xff, sizeof dynamic_memory), fresh = false;
    body = kernel, arguments = args;
    gridDim = grid, blockDim = {threads, 1, 1};
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) run_block(shared);
    check_behind(shared);
}
// A thread writes into one set while others may still read the other: a warp is never more than one exchange apart.
Message* messages() { return sets[current->parity ^= 1]; }
}  // namespace shim
