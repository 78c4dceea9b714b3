/* Runs calls of the kernel `run` of a Windows library on the memory of another process: replay.exe LIBRARY SYMBOL

   Standard input has one call after the other, in numbers of 8 bytes: the number of arguments, the arguments, and three
   lists, each behind its length: slots of blocks of memory that are gone; slots and addresses of new blocks, full of
   zeros; and slots and contents of blocks that have changed. See windows_run.py. A block has the address that it has in
   the other process, so that every pointer in it is valid here.
   The answer to a call, on standard output: RUNS before the kernel is called; behind it slots and contents of the blocks
   that the kernel changed, and END. */

#include <fcntl.h>
#include <io.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

#define ARGUMENTS 15
#define BLOCK 65536 /* what VirtualAlloc aligns addresses to */
#define SLOTS 32768
#define RUNS 1
#define END -1

typedef int64_t i64;
typedef i64 (*Run)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64);

static char *blocks[SLOTS], *before[SLOTS]; /* what the block held before the call */

static void take(void *into, size_t size)
{
    if (fread(into, 1, size, stdin) != size) {
        fprintf(stderr, "the call is cut off\n");
        exit(2);
    }
}

static i64 number(void)
{
    i64 found;
    take(&found, sizeof found);
    return found;
}

static void give(i64 number)
{
    fwrite(&number, sizeof number, 1, stdout);
}

static void take_memory(void)
{
    for (i64 left = number(); left; left--) {
        i64 slot = number();
        VirtualFree(blocks[slot], 0, MEM_RELEASE);
        blocks[slot] = NULL;
    }
    for (i64 left = number(); left; left--) {
        i64 slot = number();
        char *wanted = (char *)number();
        blocks[slot] = VirtualAlloc(wanted, BLOCK, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
        if (blocks[slot] != wanted) {
            fprintf(stderr, "address %p is taken\n", wanted);
            exit(3);
        }
        if (before[slot] == NULL)
            before[slot] = malloc(BLOCK);
        memset(before[slot], 0, BLOCK);
    }
    for (i64 left = number(); left; left--) {
        i64 slot = number();
        take(blocks[slot], BLOCK);
        memcpy(before[slot], blocks[slot], BLOCK);
    }
}

static void give_changes(void)
{
    for (i64 slot = 0; slot < SLOTS; slot++)
        if (blocks[slot] != NULL && memcmp(blocks[slot], before[slot], BLOCK) != 0) {
            memcpy(before[slot], blocks[slot], BLOCK);
            give(slot);
            fwrite(blocks[slot], 1, BLOCK, stdout);
        }
    give(END);
}

int main(int count, char **words)
{
    if (count != 3)
        return 2;
    _setmode(_fileno(stdin), _O_BINARY);
    _setmode(_fileno(stdout), _O_BINARY);
    HMODULE library = LoadLibraryA(words[1]);
    if (library == NULL) {
        fprintf(stderr, "cannot load %s: error %lu\n", words[1], GetLastError());
        return 2;
    }
    Run run = (Run)(void *)GetProcAddress(library, words[2]);
    if (run == NULL) {
        fprintf(stderr, "there is no kernel %s\n", words[2]);
        return 2;
    }
    i64 given, a[ARGUMENTS];
    while (fread(&given, sizeof given, 1, stdin) == 1) {
        if (given != ARGUMENTS) {
            fprintf(stderr, "the kernel has %lld arguments, this program passes %d\n", (long long)given, ARGUMENTS);
            return 2;
        }
        take(a, sizeof a);
        take_memory();
        give(RUNS); /* what ends the process from here on is the kernel's */
        fflush(stdout);
        if (run(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14]) == INT64_MIN) {
            fprintf(stderr, "the kernel failed\n");
            return 2;
        }
        give_changes();
        fflush(stdout);
    }
    return 0;
}
