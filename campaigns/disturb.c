/* Preloaded into the command by campaigns/faults.py. Does nothing unless the environment asks for it:
   CAMPAIGN_CLOCK=1      the wall clock jumps every half second, by up to two hours in both directions
   CAMPAIGN_SLOW_DISK=1  fsync takes 0.1 s more, and each write to a file 5 ms more */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static time_t jump(void) {
    struct timespec now;
    if (!getenv("CAMPAIGN_CLOCK")) return 0;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    long half_seconds = now.tv_sec * 2 + now.tv_nsec / 500000000;
    return (half_seconds * 7919 % 5 - 2) * 3600;
}

int clock_gettime(clockid_t id, struct timespec *found) {
    int failed = syscall(SYS_clock_gettime, id, found);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) found->tv_sec += jump();
    return failed;
}

int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}

static void wait_for_disk(int file, long microseconds) {
    struct stat about;
    if (getenv("CAMPAIGN_SLOW_DISK") && !fstat(file, &about) && (S_ISREG(about.st_mode) || S_ISDIR(about.st_mode)))
        usleep(microseconds);
}

int fsync(int file) { wait_for_disk(file, 100000); return REAL(fsync)(file); }
int fdatasync(int file) { wait_for_disk(file, 100000); return REAL(fdatasync)(file); }
ssize_t write(int file, const void *data, size_t size) { wait_for_disk(file, 5000); return REAL(write)(file, data, size); }
ssize_t writev(int file, const struct iovec *parts, int count) {
    wait_for_disk(file, 5000);
    return REAL(writev)(file, parts, count);
}
