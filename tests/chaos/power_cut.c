/* Remembers what every file under POWER_CUT_FOLDER held when it was synced last, in POWER_CUT_SHADOW by inode.
   Loaded before a program's other libraries (LD_PRELOAD); `tests/chaos/power_cuts.py` builds it and says what is left
   of the files when the power fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A slow disk: most failures of power then come between a write and its sync. */
#define SLOW_US 30000

static void remember(int fd) {
    const char *folder = getenv("POWER_CUT_FOLDER"), *shadow = getenv("POWER_CUT_SHADOW");
    char link[64], path[4096], made[4096], final[4096], block[65536];
    struct stat is;
    if (!folder || !shadow || fstat(fd, &is) || !S_ISREG(is.st_mode)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder))) return;
    snprintf(final, sizeof final, "%s/%lu", shadow, (unsigned long)is.st_ino);
    snprintf(made, sizeof made, "%s.%ld", final, syscall(SYS_gettid));
    int from = open(link, O_RDONLY | O_CLOEXEC), to = open(made, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    for (ssize_t got; from >= 0 && to >= 0 && (got = read(from, block, sizeof block)) > 0;)
        if (write(to, block, got) != got) abort();
    if (from >= 0) close(from);
    if (to >= 0) close(to);
    rename(made, final);
}

int fsync(int fd) {
    int (*synced)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    usleep(SLOW_US);
    int failed = synced(fd);
    if (!failed) remember(fd);
    return failed;
}

int fdatasync(int fd) {
    int (*synced)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    usleep(SLOW_US);
    int failed = synced(fd);
    if (!failed) remember(fd);
    return failed;
}
