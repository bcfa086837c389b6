import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;

/** The server in Java that bench/hibernate measures: java Hello PORT */
public class Hello {
    public static void main(String[] words) throws Exception {
        byte[] answer = "hello".getBytes();
        HttpServer server = HttpServer.create(new InetSocketAddress(Integer.parseInt(words[0])), 0);
        server.createContext("/", exchange -> {
            exchange.sendResponseHeaders(200, answer.length);
            exchange.getResponseBody().write(answer);
            exchange.close();
        });
        server.start();
    }
}
