/* Remembers what every file under POWER_CUT_FOLDER held when it was synced last, in POWER_CUT_SHADOW by inode, and
   forgets it when the file is removed or replaced, since a new file may get its inode.
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

/* What is remembered of the file at this path, into `shadow`; empty where its inode goes on under another name. */
static void shadow_of(int folder, const char *path, char *shadow, size_t room) {
    const char *shadows = getenv("POWER_CUT_SHADOW");
    struct stat is;
    shadow[0] = 0;
    if (!shadows || fstatat(folder, path, &is, AT_SYMLINK_NOFOLLOW) || !S_ISREG(is.st_mode) || is.st_nlink > 1) return;
    snprintf(shadow, room, "%s/%lu", shadows, (unsigned long)is.st_ino);
}

/* The system call itself, not the library's function, which stands below. */
static int removed(int folder, const char *path, int flags) {
    char shadow[4096];
    shadow_of(folder, path, shadow, sizeof shadow);
    int failed = (int)syscall(SYS_unlinkat, folder, path, flags);
    if (!failed && shadow[0]) syscall(SYS_unlinkat, AT_FDCWD, shadow, 0);
    return failed;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }

int unlinkat(int folder, const char *path, int flags) { return removed(folder, path, flags); }

int remove(const char *path) {
    struct stat is;
    int directory = !lstat(path, &is) && S_ISDIR(is.st_mode);
    return removed(AT_FDCWD, path, directory ? AT_REMOVEDIR : 0);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    char shadow[4096];
    struct stat old, new;
    int same = !fstatat(from_folder, from, &old, AT_SYMLINK_NOFOLLOW)
        && !fstatat(to_folder, to, &new, AT_SYMLINK_NOFOLLOW) && old.st_ino == new.st_ino;
    shadow_of(to_folder, to, shadow, sizeof shadow);
    int failed = (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, 0);
    if (!failed && shadow[0] && !same) syscall(SYS_unlinkat, AT_FDCWD, shadow, 0);
    return failed;
}

int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }
