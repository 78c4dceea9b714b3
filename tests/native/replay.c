/* Runs one call of the kernel `run` of a Windows library: replay.exe LIBRARY SYMBOL CALL RESULT.

   CALL holds the number of arguments, the arguments, the ranges of memory that the kernel may use, and their content:
   see windows_run.py.
   The memory is mapped at the same addresses as in the process that recorded the call, so that every pointer in it is
   valid here. RESULT gets the 8-byte words that the kernel changed: address and new value of each. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

#define ARGUMENTS 15
#define BLOCK 65536 /* what VirtualAlloc aligns addresses to */

typedef int64_t i64;
typedef i64 (*Run)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64);

static void take(void *into, size_t size, FILE *file)
{
    if (fread(into, 1, size, file) != size) {
        fprintf(stderr, "the call is cut off\n");
        exit(2);
    }
}

int main(int count, char **words)
{
    if (count != 5)
        return 2;
    HMODULE library = LoadLibraryA(words[1]);
    if (library == NULL) {
        fprintf(stderr, "cannot load %s: error %lu\n", words[1], GetLastError());
        return 2;
    }
    Run run = (Run)(void *)GetProcAddress(library, words[2]);
    FILE *call = fopen(words[3], "rb");
    FILE *result = fopen(words[4], "wb");
    if (run == NULL || call == NULL || result == NULL) {
        fprintf(stderr, "cannot open the kernel or a file\n");
        return 2;
    }
    i64 given, a[ARGUMENTS], ranges, blocks;
    take(&given, 8, call);
    if (given != ARGUMENTS) {
        fprintf(stderr, "the kernel has %lld arguments, this program passes %d\n", (long long)given, ARGUMENTS);
        return 2;
    }
    take(a, sizeof a, call);
    take(&ranges, 8, call);
    i64(*range)[2] = malloc(ranges * 16);
    take(range, ranges * 16, call);
    for (i64 i = 0; i < ranges; i++) {
        void *wanted = (void *)range[i][0];
        if (VirtualAlloc(wanted, range[i][1], MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE) != wanted) {
            fprintf(stderr, "address %p is taken\n", wanted);
            return 3;
        }
    }
    take(&blocks, 8, call);
    for (i64 i = 0; i < blocks; i++) {
        i64 address;
        take(&address, 8, call);
        take((void *)address, BLOCK, call);
    }
    char **before = malloc(ranges * sizeof(char *));
    for (i64 i = 0; i < ranges; i++) {
        before[i] = malloc(range[i][1]);
        memcpy(before[i], (void *)range[i][0], range[i][1]);
    }
    fprintf(stderr, "the kernel runs\n"); /* what ends the process from here on is the kernel's */
    fflush(stderr);
    if (run(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14]) == INT64_MIN) {
        fprintf(stderr, "the kernel failed\n");
        return 2;
    }
    for (i64 i = 0; i < ranges; i++) {
        i64 *now = (i64 *)range[i][0], *then = (i64 *)before[i];
        for (i64 k = 0; k < range[i][1] / 8; k++)
            if (now[k] != then[k]) {
                i64 pair[2] = {(i64)(now + k), now[k]};
                fwrite(pair, 16, 1, result);
            }
    }
    if (fclose(result) != 0) {
        fprintf(stderr, "cannot write the result\n");
        return 2;
    }
    return 0;
}
