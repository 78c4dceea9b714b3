/* Threads of a Windows library wait for each other: barrier.exe LIBRARY SYMBOL THREADS CALLS STEPS WIDTH LINES SLOTS FEWEST

   Every thread calls the kernel `run` CALLS times with a plan of STEPS steps that do nothing, each with a barrier behind
   it. More threads than cores make some of them sleep there. Prints how often a thread's call ended with a wait in which
   it slept: it then spins FEWEST times in the next.
   The arrays are those that the thread pool has: LINES cache lines of counters before those of the threads, SLOTS slots
   and steps of WIDTH numbers. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

#define MOST 64
#define LINE 8 /* int64 of a cache line */

typedef int64_t i64;
typedef i64 (*Run)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64);

static Run run;
static i64 threads, calls, steps, width, lines, slots, fewest, plan, state, counters, slept;

static DWORD WINAPI work(void *number)
{
    i64 thread = (i64)number, before = 0;
    volatile i64 *spins = (i64 *)counters + (lines + thread) * LINE + 2;
    for (i64 call = 0; call < calls; call++) {
        *spins = 0;
        before = run(plan, steps, width, state, slots, plan, steps, width, state, slots, thread, threads, counters,
                     before, 0);
        if (*spins == fewest)
            InterlockedIncrement64(&slept);
    }
    return before == threads * calls * steps ? 0 : 1;
}

int main(int count, char **words)
{
    if (count != 10)
        return 2;
    HMODULE library = LoadLibraryA(words[1]);
    run = library == NULL ? NULL : (Run)(void *)GetProcAddress(library, words[2]);
    if (run == NULL) {
        fprintf(stderr, "cannot load %s: error %lu\n", words[1], GetLastError());
        return 2;
    }
    i64 *numbers[] = {&threads, &calls, &steps, &width, &lines, &slots, &fewest};
    for (int i = 0; i < 7; i++)
        *numbers[i] = atoll(words[3 + i]);
    if (threads > MOST)
        return 2;
    plan = (i64)_aligned_malloc(8 * steps * width, 64);
    memset((void *)plan, 255, 8 * steps * width);
    state = (i64)_aligned_malloc(8 * slots, 64);
    memset((void *)state, 0, 8 * slots);
    counters = (i64)_aligned_malloc(8 * LINE * (lines + threads), 64);
    memset((void *)counters, 0, 8 * LINE * (lines + threads));
    HANDLE all[MOST];
    for (i64 thread = 0; thread < threads; thread++)
        all[thread] = CreateThread(NULL, 0, work, (void *)thread, 0, NULL);
    for (i64 thread = 0; thread < threads; thread++) {
        DWORD wrong = 1;
        WaitForSingleObject(all[thread], INFINITE);
        if (!GetExitCodeThread(all[thread], &wrong) || wrong) {
            fprintf(stderr, "thread %lld counted other arrivals\n", (long long)thread);
            return 1;
        }
    }
    printf("%lld\n", (long long)slept);
    return 0;
}
