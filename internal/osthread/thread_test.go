package osthread

import (
	"runtime"
	"testing"
)

func TestID(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, there := ID(), make(chan int)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		there <- ID()
	}()
	if other := <-there; other == here || ID() != here {
		t.Errorf("two threads are %d and %d, and the first is %d afterwards", here, other, ID())
	}
}
