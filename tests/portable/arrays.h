/* The file that record.py writes: named arrays, in sections. A section begins with a text called
 * "problem", its title, before the fields of a plan and of the rules; or "call": solve, train,
 * backward, loss, within or pull. */
#ifndef TAUT_ARRAYS_H
#define TAUT_ARRAYS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC "taut 2\n" /* read as an integer, also tells the order of bytes */

#define MOST 96 /* arrays of a section */

typedef struct {
    char name[32];
    int64_t bytes; /* in the file, data is filled up to a multiple of 8 */
    void *data;
} Array;

typedef struct {
    int count;
    Array arrays[MOST];
} Section;

static void stop(const char *why, const char *what) {
    fprintf(stderr, "harness: %s%s\n", why, what);
    exit(2);
}

/* Of exactly the size asked for, so that a sanitizer sees the first byte beyond. */
static void *room(int64_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) stop("no memory", "");
    return memory;
}

static FILE *open_problems(const char *path) {
    int64_t magic, expected = 0;
    FILE *file = fopen(path, "rb");
    if (!file) stop("cannot open ", path);
    for (int i = 7; i >= 0; i--) expected = 256 * expected + MAGIC[i];
    if (fread(&magic, 8, 1, file) != 1 || magic != expected)
        stop("not written by record.py: ", path);
    return file;
}

static int begins_section(const char *name) {
    return !strcmp(name, "problem") || !strcmp(name, "call");
}

/* The next section; its first array, already read, is in `ahead`, which then holds that of the
 * section after it. An empty name says that the file has ended. */
static Section read_section(FILE *file, Array *ahead) {
    Section section = {.count = 1, .arrays = {*ahead}};
    for (;;) {
        Array array;
        char filling[8];
        ahead->name[0] = 0;
        if (fread(array.name, sizeof array.name, 1, file) != 1) return section;
        if (fread(&array.bytes, 8, 1, file) != 1) stop("the file ends too soon", "");
        array.data = room(array.bytes);
        size_t rest = -array.bytes & 7;
        if (fread(array.data, 1, array.bytes, file) != (size_t)array.bytes ||
            fread(filling, 1, rest, file) != rest)
            stop("the file ends too soon in ", array.name);
        if (begins_section(array.name)) {
            *ahead = array;
            return section;
        }
        if (section.count == MOST) stop("too many arrays", "");
        section.arrays[section.count++] = array;
    }
}

static void free_section(Section *section) {
    for (int i = 0; i < section->count; i++) free(section->arrays[i].data);
}

/* NULL where there is none */
static const Array *find(const Section *section, const char *name) {
    for (int i = 0; i < section->count; i++)
        if (!strcmp(section->arrays[i].name, name)) return &section->arrays[i];
    return NULL;
}

static void *data(const Section *section, const char *name) {
    const Array *array = find(section, name);
    return array ? array->data : NULL;
}

static int64_t integer(const Section *section, const char *name) {
    const Array *array = find(section, name);
    if (!array || array->bytes != 8) stop("no integer called ", name);
    return *(int64_t *)array->data;
}

static double real(const Section *section, const char *name) {
    const Array *array = find(section, name);
    if (!array || array->bytes != 8) stop("no number called ", name);
    return *(double *)array->data;
}

static double entry(const void *x, int64_t i, int64_t single) {
    return single ? ((const float *)x)[i] : ((const double *)x)[i];
}

#endif
