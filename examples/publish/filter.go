package main

import (
	"encoding/binary"
	"math"
	"runtime"
	"sync"

	"github.com/purecuda/purecuda/cudasim"
)

// The filter makes an ink drawing of a picture: what is darker than around it
// becomes a line of ink, and a light wash of the colours is left. It blurs the
// picture along the rows, then along the columns, and divides the picture by
// the result. It is here twice: as a plain CPU reference, and as the Go
// functions that stand for the kernels of blur.ptx on the simulator, thread by
// thread.

// radiusOf is the reach of the blur, in pixels.
func radiusOf(width, height int) int {
	return min(max(max(width, height)/96, 2), 32)
}

// weightsOf returns the 2*radius+1 weights of a Gaussian whose sum is 65536.
func weightsOf(radius int) []uint32 {
	w := make([]uint32, 2*radius+1)
	sigma := float64(radius) / 2
	total := 0.0
	for i := range w {
		total += gauss(i-radius, sigma)
	}
	left := uint32(65536)
	for i := range w {
		w[i] = uint32(65536 * gauss(i-radius, sigma) / total)
		left -= w[i]
	}
	w[radius] += left // what rounding down left over
	return w
}

func gauss(x int, sigma float64) float64 {
	return math.Exp(-float64(x*x) / (2 * sigma * sigma))
}

// inked is one byte of the drawing: from the byte of the picture, and the same
// byte of its blur.
func inked(sharp, soft uint32) uint32 {
	line := min(255*sharp/max(soft, 1), 255)
	return line * line / 255 * ((sharp + 255) / 2) / 255
}

// reference is the filter on the CPU: what the device must give, byte for byte.
func reference(pix []byte, width, height int) []byte {
	radius := radiusOf(width, height)
	weights := weightsOf(radius)
	rows, soft := make([]byte, len(pix)), make([]byte, len(pix))
	eachRow(height, func(y int) {
		line := pix[y*width*4 : (y+1)*width*4]
		for x := range width {
			mean(rows[(y*width+x)*4:], line, x, width, 4, weights)
		}
	})
	eachRow(height, func(y int) {
		for x := range width {
			mean(soft[(y*width+x)*4:], rows[x*4:], y, height, width*4, weights)
		}
	})
	eachRow(height, func(y int) {
		for i := y * width * 4; i < (y+1)*width*4; i++ {
			soft[i] = byte(inked(uint32(pix[i]), uint32(soft[i])))
		}
	})
	return soft
}

// mean writes the weighted mean of the pixels around position at of a line of n
// pixels that lie stride bytes apart.
func mean(out, line []byte, at, n, stride int, weights []uint32) {
	var sum [4]uint32
	for i, w := range weights {
		p := line[min(max(at+i-len(weights)/2, 0), n-1)*stride:][:4]
		for c, v := range p {
			sum[c] += w * uint32(v)
		}
	}
	for c, s := range sum {
		out[c] = byte((s + 32768) >> 16)
	}
}

// eachRow calls f for each row, on all processors.
func eachRow(rows int, f func(y int)) {
	var wg sync.WaitGroup
	n := runtime.GOMAXPROCS(0)
	for k := range n {
		wg.Go(func() {
			for y := k; y < rows; y += n {
				f(y)
			}
		})
	}
	wg.Wait()
}

// addKernels gives the simulator what stands for the kernels of blur.ptx.
func addKernels(sim *cudasim.Sim) {
	sim.Kernel("blur", func(l *cudasim.Launch) {
		src, dst, weights := l.Bytes(0), l.Bytes(1), l.Bytes(2)
		width, height, radius := int(l.I32(3)), int(l.I32(4)), int(l.I32(5))
		dx, dy := int(l.I32(6)), int(l.I32(7))
		for y := range int(l.Grid[1] * l.Block[1]) {
			for x := range int(l.Grid[0] * l.Block[0]) {
				if x >= width || y >= height {
					continue
				}
				sum := [4]uint32{32768, 32768, 32768, 32768}
				for i := -radius; i <= radius; i++ {
					column := min(max(x+i*dx, 0), width-1)
					row := min(max(y+i*dy, 0), height-1)
					weight := binary.LittleEndian.Uint32(weights[4*(i+radius):])
					pixel := src[4*(row*width+column):][:4]
					for c := range sum {
						sum[c] += weight * uint32(pixel[c])
					}
				}
				for c := range sum {
					dst[4*(y*width+x)+c] = byte(sum[c] >> 16)
				}
			}
		}
	})
	sim.Kernel("ink", func(l *cudasim.Launch) {
		src, blurred, dst, n := l.Bytes(0), l.Bytes(1), l.Bytes(2), l.U32(3)
		for i := range l.Grid[0] * l.Block[0] {
			if i < n {
				dst[i] = byte(inked(uint32(src[i]), uint32(blurred[i])))
			}
		}
	})
}
