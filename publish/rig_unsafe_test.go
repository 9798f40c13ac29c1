package publish_test

import "unsafe"

func addressOf(p []byte) uintptr { return uintptr(unsafe.Pointer(&p[0])) }
